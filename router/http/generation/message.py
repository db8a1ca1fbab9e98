"""The assistant's message in OpenAI's objects: content, reasoning and tool calls."""

from collections.abc import Container, Iterator

from router.answers.answer import Delta
from router.http.bodies.body import Json
from text.parsing.pieces import CallBegin, CallPiece
from text.parsing.text_argument import TextArgument, argument_text


def whole_message(deltas: list[Delta], custom: Container[str] = ()) -> Json:
    """Return the message of all deltas of a choice; its content is null if there is only reasoning or calls.

    custom: names of custom tools.
    """
    content = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = _whole_calls([piece for delta in deltas for piece in delta.calls])
    is_empty = not content and (reasoning or calls)
    message: Json = {"role": "assistant", "content": None if is_empty else content, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = [_custom_if_named(call, custom) for call in calls]
    return message


class CallDeltas:
    """Writes the calls of one choice of a stream. Owns the text of the calls of custom tools, by index.

    custom: names of custom tools.
    """

    def __init__(self, custom: Container[str]) -> None:
        self._custom = custom
        self._texts: dict[int, TextArgument] = {}

    def written(self, piece: CallPiece) -> Iterator[Json]:
        """Yield the entries of ``tool_calls`` for a piece."""
        if isinstance(piece, CallBegin):
            yield from self.rest()
            if piece.name in self._custom:
                self._texts[piece.index] = TextArgument()
                yield {"index": piece.index, **_custom_call(piece.call_id, piece.name, "")}
            else:
                yield {"index": piece.index, **_call(piece)}
        elif (text := self._texts.get(piece.index)) is None:
            yield {"index": piece.index, "function": {"arguments": piece.text}}
        elif shown := text.push(piece.text):
            yield {"index": piece.index, "custom": {"input": shown}}

    def rest(self) -> Iterator[Json]:
        """Yield the texts that were held back, when another call begins or the answer ends."""
        for index, text in self._texts.items():
            if shown := text.flush():
                yield {"index": index, "custom": {"input": shown}}


def message_deltas(delta: Delta, calls: CallDeltas) -> list[Json]:
    """Return the ``delta`` objects of a stream for one delta, each with one kind of content; a call's name is separate."""
    out: list[Json] = []
    if delta.reasoning:
        out.append(_reasoning(delta.reasoning))
    if delta.text:
        out.append({"content": delta.text})
    out += [{"tool_calls": [call]} for piece in delta.calls for call in calls.written(piece)]
    return out + [{"tool_calls": [call]} for call in (calls.rest() if delta.finish_reason else ())]


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}  # clients look for either name


def _whole_calls(pieces: list[CallPiece]) -> list[Json]:
    calls: dict[int, Json] = {}
    for piece in pieces:
        if isinstance(piece, CallBegin):
            calls[piece.index] = _call(piece)
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    return list(calls.values())


def _call(begin: CallBegin) -> Json:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


def _custom_if_named(call: Json, custom: Container[str]) -> Json:
    function = call["function"]
    if function["name"] not in custom:
        return call
    return _custom_call(call["id"], function["name"], argument_text(function["arguments"]))


def _custom_call(call_id: str, name: str, text: str) -> Json:
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
