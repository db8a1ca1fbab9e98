"""The probe's questions about turns: whether a prompt is the beginning of the prompt of the next turn.

A template that rewrites earlier turns lets the prefix cache end there: the service must compute everything behind anew.
"""

from collections.abc import Iterator
from itertools import pairwise

from text.chat import Chat, Message
from text.templates.probe import Probe, chat, message_of, word
from text.templates.questions_tools import described_tool

KIND = "earlier turns"
KEPT = "unchanged in later prompts"
"""The report's words for a template that only appends."""


def ask_about_turns(probe: Probe) -> None:
    """Record which kinds of turns the template writes otherwise in later prompts."""
    rewritten = [
        kind for kind, conversation in _conversations() if (num_rewrites(probe, conversation) or 0) > 0
    ]
    probe.note(KIND, f"rewritten: {', '.join(rewritten)}" if rewritten else KEPT)


def num_rewrites(probe: Probe, conversation: Chat) -> int | None:
    """Return how many requests have a prompt that does not begin with the one before, up to its last message's text.

    None if the template does not show the conversation.
    """
    requests = list(requests_of(conversation))
    prompts = [probe.written(request, probe.form) for request in requests]
    shown = [prompt for prompt in prompts if prompt is not None]
    if len(shown) < len(prompts):
        return None
    contents = [request.messages[-1]["content"] for request in requests]
    return sum(
        not is_continued(earlier, later, content)
        for (earlier, later), content in zip(pairwise(shown), contents, strict=False)
    )


def is_continued(earlier: str, later: str, last_text: str) -> bool:
    """Return whether a prompt begins with an earlier one. What follows the last text there may be an answer's header."""
    end = earlier.rfind(last_text)
    return end >= 0 and later.startswith(earlier[: end + len(last_text)])


def requests_of(conversation: Chat) -> Iterator[Chat]:
    """Yield the requests of an agent that has this conversation, without the header of the answer.

    Each ends before an answer, or with the last message.
    """
    messages = conversation.messages
    for end in range(1, len(messages) + 1):
        is_next = end == len(messages) or messages[end]["role"] == "assistant"
        if is_next and messages[end - 1]["role"] != "assistant":
            yield Chat(messages=messages[:end], tools=conversation.tools, add_generation_prompt=False)


def _conversations() -> Iterator[tuple[str, Chat]]:
    tool = described_tool()
    question = message_of("user")
    answer = message_of("assistant")
    yield "questions", chat(message_of("system"), question, answer, message_of("user"), answer, question)
    steps = [*_step(tool["function"]["name"]), *_step(tool["function"]["name"])]
    yield "calls", chat(question, *steps, answer, message_of("user"), answer, question, tools=(tool,))
    thinking = {**answer, "reasoning_content": word()}
    yield "reasoning of answers", chat(question, thinking, message_of("user"), thinking, question)
    thoughtful = [*_step(tool["function"]["name"], word()), *_step(tool["function"]["name"], word())]
    yield "reasoning between calls", chat(question, *thoughtful, tools=(tool,))
    yield (
        "reasoning of earlier calls",
        chat(question, *thoughtful, answer, message_of("user"), answer, question, tools=(tool,)),
    )
    yield (
        "later system messages",
        chat(question, answer, message_of("user"), message_of("system"), answer, question),
    )


def _step(name: str, reasoning: str | None = None) -> list[Message]:
    call = {
        "id": "call_000000000",
        "type": "function",
        "function": {"name": name, "arguments": f'{{"a": "{word()}"}}'},
    }
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call], **thought},
        message_of("tool", tool_call_id="call_000000000", name=name),
    ]
