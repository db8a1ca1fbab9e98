"""An argument that is null was not given: a template that leaves it out loses nothing."""

import json
from typing import Any

import pytest

from tests.text import agent_templates
from text.chat import Chat, parse_messages
from text.templates.chat_template import ChatTemplate

WRITE = "{{ '<parameter name=\"' + k + '\">' }}{{ v if v is string else v | tojson }}{{ '</parameter>\n' }}"
SKIPS = agent_templates.MINIMAX.replace(WRITE, "{% if v is not none %}" + WRITE + "{% endif %}")
"""Like MiniMax M3: arguments that are null are not written."""
DROPS = agent_templates.MINIMAX.replace(WRITE, "{% if v %}" + WRITE + "{% endif %}")
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def prompt_of(source: str, arguments: dict[str, Any]) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "RESULT"},
    ]
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    return template.render(Chat(messages=parse_messages(messages), tools=(TOOL,)))


@pytest.mark.parametrize("arguments", [{"path": None}, {"path": "a", "limit": None}, {"a": {"b": None}}])
def test_a_null_argument_keeps_the_templates_own_form(arguments: dict[str, Any]) -> None:
    """C10: the whole call fell back to JSON text, which the model was not trained on."""
    assert SKIPS != agent_templates.MINIMAX
    prompt = prompt_of(SKIPS, arguments)
    assert '<invoke name="read">' in prompt
    assert ("limit" in prompt) is False and ("RESULT" in prompt) is True


def test_another_argument_that_is_left_out_is_lost() -> None:
    assert '<invoke name="read">' not in prompt_of(DROPS, {"recursive": False}).partition("user\n")[2]
