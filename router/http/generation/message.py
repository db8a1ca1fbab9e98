"""The assistant's message in OpenAI's objects: content, reasoning and tool calls."""

from router.answer import Delta
from router.http.bodies.body import Json
from text.parsing.pieces import CallArguments, CallBegin, CallPiece


def whole_message(deltas: list[Delta]) -> Json:
    """Return the message of all deltas of a choice; its content is null if there is only reasoning or calls."""
    content = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls = _whole_calls([piece for delta in deltas for piece in delta.calls])
    is_empty = not content and (reasoning or calls)
    message: Json = {"role": "assistant", "content": None if is_empty else content, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def message_deltas(delta: Delta) -> list[Json]:
    """Return the ``delta`` objects of a stream for one delta, each with one kind of content; a call's name is separate."""
    out: list[Json] = []
    if delta.reasoning:
        out.append(_reasoning(delta.reasoning))
    if delta.text:
        out.append({"content": delta.text})
    return out + [{"tool_calls": [_call_delta(piece)]} for piece in delta.calls]


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


def _call_delta(piece: CallPiece) -> Json:
    if isinstance(piece, CallArguments):
        return {"index": piece.index, "function": {"arguments": piece.text}}
    return {"index": piece.index, **_call(piece)}


def _call(begin: CallBegin) -> Json:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": ""}}
