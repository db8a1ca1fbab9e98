"""The probe's questions about tools, calls and their results, reasoning, documents, and turns.

The last is whether a prompt is the beginning of the prompt of the next turn. A template that rewrites earlier turns lets the
prefix cache end there: the service must compute everything behind anew.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from text.chat import Chat, Message
from text.templates.forms import ABSENT, Form
from text.templates.probe import Candidate, Probe, chat, message_of, part, with_parts, word
from text.tools import Tool

_REASONING = ("reasoning_content", "thinking", "reasoning")
_IDS = {"sent": "", "nine": ", short ids", "named": ", ids with names"}
KIND = "earlier turns"
KEPT = "unchanged in later prompts"
"""The report's words for a template that only appends."""


def ask_about_tools(probe: Probe) -> None:
    """Find the forms of tools, calls, results and reasoning."""
    _ask_tools(probe)
    _ask_calls(probe)
    broken: list[Candidate] = [
        ("as text", probe.form),
        ("within an object", replace(probe.form, broken="object")),
    ]
    probe.choose("calls with broken arguments", broken, [chat(*_calling(None, _call(f'["{word()}')))])
    beside_text = chat(*_calling(word(), _call(f'{{"{word()}": "{word()}"}}')))
    split = [("one message", probe.form), ("two messages", replace(probe.form, splits_calls=True))]
    probe.choose("text and calls", split, [beside_text])
    _ask_reasoning(probe)
    _ask_bare_answers(probe)


def ask_about_documents(probe: Probe) -> None:
    """Find out whether documents are shown."""
    probe.choose("documents", [("shown", probe.form)], [chat(message_of("user"), documents=(document(),))])


def document() -> dict[str, Any]:
    """Make a document with unguessable texts."""
    return {"title": word(), "text": word()}


def make_full_tool() -> Tool:
    """Make a tool with all fields that templates read."""
    schema = {"type": "object", "properties": {word(): {"type": "string", "description": word()}}}
    return _tool(word(), description=word(), parameters=schema)


def _tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _call(arguments: str, number: int = 0) -> dict[str, Any]:
    function = {"name": word(), "arguments": arguments}
    return {"id": f"call_{number:024d}", "type": "function", "function": function}


def _calling(content: Any, *calls: dict[str, Any], **others: Any) -> list[Message]:
    """Make a question, an answer with calls, and their results."""
    results = [message_of("tool", tool_call_id=call["id"], name=call["function"]["name"]) for call in calls]
    return [
        message_of("user"),
        {"role": "assistant", "content": content, "tool_calls": list(calls), **others},
        *results,
    ]


def _ask_tools(probe: Probe) -> None:
    form = probe.form
    description = word()
    parameter = word()
    schema = {"type": "object", "properties": {parameter: {"type": "string", "description": word()}}}
    tools = tuple(_tool(word(), description=description, parameters=schema) for _ in range(2))
    chats = [
        chat(message_of("user"), tools=tools),
        chat(message_of("system"), message_of("user"), tools=tools),
    ]
    candidates = [("shown", form), ("shown, the functions alone", replace(form, tools="function"))]
    if not probe.choose(
        "tools", candidates, chats, lambda text: (description not in text) + (parameter not in text)
    ):
        candidates = [
            ("under a key of the system message", replace(form, tools="key")),
            ("in the system message", replace(form, tools="system")),
        ]
        probe.choose("tools", candidates, chats)
    # Tools may also lack their parameters, or their description.
    for key, filled, function in (
        ("parameters", "with an empty schema", {"description": word()}),
        ("description", "with an empty description", {"parameters": schema}),
    ):
        form = probe.form
        candidates = [("as sent", form), (filled, replace(form, fills=form.fills | {key}))]
        probe.choose(
            f"tools without {key}", candidates, [chat(message_of("user"), tools=(_tool(word(), **function),))]
        )


def _ask_calls(probe: Probe) -> None:
    key = word()
    value = word()
    arguments = f'{{"{key}": "{value}"}}'
    messages = _calling(None, _call(arguments))
    tools = (
        _tool(
            messages[1]["tool_calls"][0]["function"]["name"],
            description=word(),
            parameters={"type": "object", "properties": {}},
        ),
    )
    short = chat(*messages, tools=tools)
    long = chat(*messages, message_of("assistant"), message_of("user"), tools=tools)

    def num_blemishes(text: str) -> int:
        return text.count(f"'{key}': ") + text.count(f'\\"{key}') + text.count("None")

    # Some templates show calls only in the last turn.
    for chats in ([short, long], [short]):
        if probe.choose("calls", _call_forms(probe.form), chats, num_blemishes):
            _ask_call_contents(probe, short)
            _ask_result_parts(probe, messages, tools)
            return
    form = probe.form
    in_text = replace(form, calls="text")
    candidates = [
        ("as JSON in the text", in_text),
        ("as JSON in the text, results from the user", replace(in_text, results="user")),
    ]
    if not probe.choose("calls", candidates, [short]):
        probe.keep(form)


def _call_forms(form: Form) -> Iterator[Candidate]:
    results = [
        ("", form),
        (", results in parts", with_parts(form, "tool")),
        (", results from the user", replace(form, results="user")),
    ]
    for end, shaped in results:
        for ids in ("sent", "nine", "named"):
            for arguments in ("object", "text"):
                for absent in ABSENT:
                    yield (
                        f"arguments as {arguments}, content {absent}{_IDS[ids]}{end}",
                        replace(shaped, call_ids=ids, arguments=arguments, call_contents=(absent,)),
                    )


def _ask_call_contents(probe: Probe, conversation: Chat) -> None:
    """Find every content without text that is allowed beside calls."""
    chosen = probe.form.call_contents[0]
    best = probe.written(conversation, probe.form) or ""
    allowed = []
    for absent in ABSENT:
        written = probe.written(conversation, replace(probe.form, call_contents=(absent,)))
        if written is not None and written.count("None") <= best.count("None"):
            allowed.append(absent)
    probe.keep(replace(probe.form, call_contents=(chosen, *(one for one in allowed if one != chosen))))


def _ask_result_parts(probe: Probe, messages: list[Message], tools: tuple[Tool, ...]) -> None:
    """Find out whether a result's parts give the same output as their text in a string."""
    if "tool" in probe.form.parts or probe.form.results == "user":
        return
    *before, result = messages
    text = result["content"]
    kept = replace(probe.form, keeps_parts=probe.form.keeps_parts | {"tool"})
    one, two = ([part(one) for one in texts] for texts in ([text], [text, word()]))
    written = [
        probe.written(chat(*before, {**result, "content": content}, tools=tools), kept)
        for content in (one, two)
    ]
    if None not in written and written[0] == probe.written(chat(*messages, tools=tools), probe.form):
        probe.keep(kept)


def _ask_reasoning(probe: Probe) -> None:
    reasoning = word()
    call = _call(f'{{"{word()}": "{word()}"}}')
    in_calls = chat(*_calling(None, call, reasoning_content=reasoning))
    earlier = chat(
        message_of("user"), message_of("assistant", reasoning_content=reasoning), message_of("user")
    )
    for name in _REASONING:
        form = replace(probe.form, reasoning=name)
        shown = [
            reasoning in (probe.written(conversation, form) or "") for conversation in (in_calls, earlier)
        ]
        if any(shown):
            probe.keep(form)
            where = [
                text
                for text, is_shown in zip(("beside calls", "in earlier turns"), shown, strict=True)
                if is_shown
            ]
            probe.note("earlier reasoning", f"as {name}, {' and '.join(where)}")
            return
    probe.note("earlier reasoning", "dropped")
    if probe.written(earlier, probe.form) is None:
        probe.keep(replace(probe.form, reasoning=None))


def _ask_bare_answers(probe: Probe) -> None:
    """Find the content of an answer that is only reasoning: the one with the longest output and without "None"."""
    bare: Message = {"role": "assistant", "content": None, "reasoning_content": word()}
    conversation = chat(message_of("user"), bare, message_of("user"))
    tried: list[Candidate] = [(absent, replace(probe.form, bare_contents=(absent,))) for absent in ABSENT]
    written = {label: probe.written(conversation, form) or "" for label, form in tried}
    tried.sort(key=lambda one: (written[one[0]].count("None"), -len(written[one[0]])))
    empty = chat(message_of("user"), {"role": "assistant", "content": None}, message_of("user"))
    if not probe.choose("reasoning alone", tried, [conversation, empty]):
        probe.choose("reasoning alone", tried, [conversation])


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
    tool = make_full_tool()
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
