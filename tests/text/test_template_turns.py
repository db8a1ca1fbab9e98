"""Templates with strict rules about turns, calls and tools, and the forms for them."""

import copy
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from contract.errors import InvalidRequestError
from text.chat import Chat, parse_messages
from text.templates.chat_template import ChatTemplate
from text.templates.turns import one_call_each
from text.tools import parse_tools

USER = {"role": "user", "content": "What is the weather?"}
AGAIN = {"role": "user", "content": "And tomorrow?"}
ANSWER = {"role": "assistant", "content": "Sunny."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "its name"}},
        },
    },
}
BARE = {"type": "function", "function": {"name": "now"}}
ALTERNATES = (
    "{% if messages[0].role == 'system' %}<S>{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"
)
CALLS_BY_ID = (
    "{% if tools %}<T>{{ tools | tojson(separators=(',', ':')) }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content if m.content else '' }}"
    "{% for c in m.tool_calls %}<call>{{ c.id }}<args>"
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}{% endfor %}{% endfor %}<assistant>"
)
"""Like Kimi K2."""
READS_DESCRIPTIONS = (
    "{% if tools %}namespace functions {\n{% for t in tools %}{{ '// ' + t.function.description + '\n' }}"
    "type {{ t.function.name }} = (_: {{ t.function.parameters.properties | tojson }}) => any;\n{% endfor %}}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}<to={{ c.function.name }}>"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<assistant>"
)
"""Like gpt-oss."""
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<call>{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"
)
"""Like Llama 3."""
NEEDS_TOOLS = (
    "<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}<assistant>"
)
"""Like tool_use of Hermes 2 Pro."""
NEEDS_DOCUMENTS = (
    "{% for d in documents %}<{{ d.title }}>{{ d.text }}{% endfor %}"
    "{% for m in messages %}{% for p in m.content %}<{{ m.role }}>{{ p.text }}{% endfor %}{% endfor %}<assistant>"
)
READS_FIRST_PART = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and m.content[0].thinking %}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls %}<{{ c.function.name }}>{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}<assistant>"
)
"""Like Command A Reasoning: an empty content has no first element."""
RESULT_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}<assistant>"
)
ESCAPES = "{% for m in messages %}<{{ m.role }}>{{ m.content | e }}{% endfor %}<assistant>"
SWITCHES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ 'off' if '/no_think' in m.content else 'on' }}:"
    "{{ m.content.replace('/no_think', '').rstrip() or 'default' }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}<assistant>"
)
"""Like SmolLM3."""


def call(call_id: str, arguments: str = '{"city": "Paris"}', name: str = "get_weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: Any = "mild") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def calling(*calls: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def template_of(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


def rendered(source: str, messages: list[Any], tools: Any = None, **options: Any) -> str:
    chat = Chat(messages=parse_messages(copy.deepcopy(messages)), tools=parse_tools(tools), **options)
    return template_of(source).render(chat)


def transformers_render(source: str, messages: list[Any], tools: Any = None) -> str:
    """Render as transformers does; arguments of calls are objects."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    return str(render_jinja_template([messages], tools=tools, chat_template=source)[0][0])


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([USER, AGAIN], "<user>What is the weather?\n\nAnd tomorrow?<assistant>"),
        (
            [USER, ANSWER, {"role": "assistant", "content": "I think."}, AGAIN],
            "<user>What is the weather?<assistant>Sunny.\n\nI think.<user>And tomorrow?<assistant>",
        ),
        (
            [USER, {"role": "system", "content": "Be brief."}, AGAIN],
            "<user>What is the weather?\n\n<system-reminder>\nBe brief.\n</system-reminder>\n\nAnd tomorrow?<assistant>",
        ),
    ],
)
def test_neighbours_of_one_role_are_merged_for_a_template_whose_roles_alternate(
    messages: list[Any], wanted: str
) -> None:
    """F6: also those that became neighbours because a system message between them was marked."""
    assert rendered(ALTERNATES, messages) == wanted


def test_reasoning_of_merged_answers_is_merged_too() -> None:
    source = ALTERNATES.replace("{{ m.content | trim }}", "{{ m.reasoning_content }}|{{ m.content }}")
    messages = [USER, {**ANSWER, "reasoning_content": "One."}, {**ANSWER, "reasoning": "Two."}, AGAIN]
    assert "<assistant>One.\n\nTwo.|Sunny.\n\nSunny.<user>" in rendered(source, messages)


@pytest.mark.parametrize(
    ("call_id", "number"), [("functions.get_weather:7", 7), ("call_0123", 0), ("get_weather:7", 7)]
)
def test_a_template_that_writes_calls_by_their_id_gets_ids_with_the_name(call_id: str, number: int) -> None:
    """F4: Kimi K2 writes no name beside the id, so that a call of another id was lost."""
    messages = [USER, calling(call(call_id)), result(call_id)]
    named = json.loads(json.dumps(messages).replace(call_id, f"functions.get_weather:{number}"))
    assert rendered(CALLS_BY_ID, messages, [WEATHER]) == transformers_render(CALLS_BY_ID, named, [WEATHER])


def test_named_ids_number_the_calls_of_a_conversation() -> None:
    messages = [
        USER,
        calling(call("a"), call("b")),
        result("b"),
        result("a"),
        calling(call("c")),
        result("c"),
    ]
    prompt = rendered(CALLS_BY_ID, messages)
    assert [f"<call>functions.get_weather:{index}<" in prompt for index in range(4)] == [
        True,
        True,
        True,
        False,
    ]
    assert prompt.index("Return of functions.get_weather:1") < prompt.index(
        "Return of functions.get_weather:0"
    )


def test_tools_are_shown_as_the_template_does_where_one_without_description_would_break_it() -> None:
    """F1: gpt-oss writes the description of every tool; one without made all tools go to the system message."""
    messages = [USER, calling(call("call_1"), content=""), result("call_1")]
    prompt = rendered(READS_DESCRIPTIONS, messages, [WEATHER])
    assert prompt == transformers_render(READS_DESCRIPTIONS, messages, [WEATHER])
    both = rendered(READS_DESCRIPTIONS, [USER], [WEATHER, BARE])
    assert "// \ntype now = (_: {}) => any;" in both and "// Weather of a city\n" in both


def test_calls_at_once_are_parted_for_a_template_that_takes_one() -> None:
    messages = [
        USER,
        calling(call("a"), call("b", '{"city": "Rome"}'), call("c", '{"city": "Oslo"}')),
        result("b", "rain"),
        result("a", "sun"),
        result("c", "snow"),
        AGAIN,
    ]
    assert rendered(ONE_CALL, messages) == (
        '<user>What is the weather?<call>get_weather{"city": "Paris"}<tool>sun<call>get_weather{"city": "Rome"}<tool>rain'
        '<call>get_weather{"city": "Oslo"}<tool>snow<user>And tomorrow?<assistant>'
    )
    unknown = [
        USER,
        calling(call("a"), call("b")),
        result("x", "one"),
        result("y", "two"),
        result("z", "three"),
    ]
    prompt = rendered(ONE_CALL, unknown)
    assert prompt.count("<call>") == 2 and prompt.index("one") < prompt.index("two") < prompt.index("three")


def test_a_template_for_conversations_with_tools_is_probed_with_tools() -> None:
    """F3: without tools it raises, so that nothing was found out about it."""
    template = template_of("{{ messages[0].content }}", tool_source=NEEDS_TOOLS)
    messages = [USER, calling(call("call_1"), content=""), result("call_1")]
    chat = Chat(messages=parse_messages(messages), tools=parse_tools([WEATHER]))
    assert template.render(chat) == (
        f"<tools>{json.dumps(WEATHER)}<user>What is the weather?<assistant>"
        'get_weather{"city": "Paris"}<tool>mild<assistant>'
    )
    assert template.report.abilities["tool_use"]["calls"] == "arguments as text, content empty"
    assert not any("tool_use" in problem for problem in template.report.problems())


def test_a_template_for_conversations_with_documents_is_probed_with_documents() -> None:
    named = {"rag": NEEDS_DOCUMENTS}
    template = template_of("{% for m in messages %}{{ m.content }}{% endfor %}", named=named)
    document = {"title": "Weather", "text": "It rains."}
    chat = Chat(messages=parse_messages([USER, ANSWER, AGAIN]), documents=(document,))
    assert template.render(chat) == (
        "<Weather>It rains.<user>What is the weather?<assistant>Sunny.<user>And tomorrow?<assistant>"
    )


@pytest.mark.parametrize("content", [None, ""])
def test_an_answer_without_content_may_be_an_empty_part(content: Any) -> None:
    """F2, F10: a template that looks at the first element of a content refused empty answers, and calls beside none."""
    messages = [USER, calling(call("call_1"), content=content), result("call_1")]
    assert '<assistant><get_weather>{"city": "Paris"}<tool>mild' in rendered(READS_FIRST_PART, messages)
    empty = [USER, {"role": "assistant", "content": content}, AGAIN]
    assert rendered(READS_FIRST_PART, empty).endswith("<assistant><user>And tomorrow?<assistant>")


def test_parts_of_a_result_are_kept_where_the_template_takes_them() -> None:
    parts = [{"type": "text", "text": "mild "}, {"type": "text", "text": "and dry"}]
    messages = [USER, calling(call("call_1"), content=""), result("call_1", parts)]
    assert rendered(RESULT_PARTS, messages) == transformers_render(RESULT_PARTS, messages)


def test_a_template_that_escapes_html_shows_quotes() -> None:
    messages = [{"role": "user", "content": """<b> "a" & 'b'"""}]
    assert rendered(ESCAPES, messages) == transformers_render(ESCAPES, messages)


@pytest.mark.parametrize("system", ["/no_think", "Be brief. /no_think", "Be brief."])
def test_a_template_may_take_out_a_switch(system: str) -> None:
    messages = [{"role": "system", "content": system}, USER]
    assert rendered(SWITCHES, messages) == transformers_render(SWITCHES, messages)


@pytest.mark.parametrize("system", ["/etc/no_think is a file", "Say /no_thinking"])
def test_a_template_may_take_out_nothing_else(system: str) -> None:
    with pytest.raises(InvalidRequestError, match="does not show"):
        rendered(SWITCHES, [{"role": "system", "content": system}, USER])


def test_options_of_tojson_may_be_given_by_their_place() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson(True, 2) }}{% endfor %}"
    messages = [{"role": "user", "content": "é"}]
    assert rendered(source, messages) == transformers_render(source, messages)


def test_an_empty_system_message_adds_nothing_to_the_user() -> None:
    source = ALTERNATES.replace("<S>{{ messages[0].content }}", "{{ raise_exception('no system role') }}")
    assert (
        rendered(source, [{"role": "system", "content": ""}, USER]) == "<user>What is the weather?<assistant>"
    )


def test_many_results_of_many_calls_stay_in_their_order() -> None:
    """H6: calls and results are paired in one pass."""
    calls = [call(f"id_{number}") for number in range(300)]
    results = [result(f"id_{number}", f"r{number};") for number in reversed(range(0, 300, 2))]
    parted = one_call_each([calling(*calls), *results, result("x", "rx;"), result("y", "ry;")])
    assert len(parted) == 300 + 150 + 2
    assert [message["content"] for message in parted[:6]] == [None, "r0;", None, "rx;", None, "r2;"]
    assert [len(message["tool_calls"]) for message in parted if "tool_calls" in message] == [1] * 300
