"""The content blocks of an answer in Anthropic's format: their events while they are written, and the whole blocks."""

import msgspec

from router.http.bodies.body import Json
from router.http.messages.conversation import client_call_id
from text.parsing.mended import ArgumentsWriter


class TextBlock:
    """Text for the reader."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""

    def begin(self) -> Json:
        """Return the event that begins the block."""
        return _begin(self._index, {"type": "text", "text": ""})

    def push(self, text: str) -> list[Json]:
        """Return the events of more text."""
        self._text += text
        return [_delta(self._index, {"type": "text_delta", "text": text})]

    def end(self) -> list[Json]:
        """Return the last events of the block."""
        return [_end(self._index)]

    def whole(self) -> Json:
        """Return the block."""
        return {"type": "text", "text": self._text}


class ThinkingBlock:
    """Reasoning. The signature is empty: the block is accepted without one when it is sent back."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""

    def begin(self) -> Json:
        """Return the event that begins the block."""
        return _begin(self._index, {"type": "thinking", "thinking": "", "signature": ""})

    def push(self, text: str) -> list[Json]:
        """Return the events of more text."""
        self._text += text
        return [_delta(self._index, {"type": "thinking_delta", "thinking": text})]

    def end(self) -> list[Json]:
        """Return the last events of the block."""
        return [_end(self._index)]

    def whole(self) -> Json:
        """Return the block."""
        return {"type": "thinking", "thinking": self._text, "signature": ""}


class ToolUseBlock:
    """A call. Its input is always an object: other output of the model is repaired (``text.parsing.mended``)."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._index = index
        self._head = {"type": "tool_use", "id": client_call_id(call_id), "name": name}
        self._writer = ArgumentsWriter()
        self._input = ""

    def begin(self) -> Json:
        """Return the event that begins the block."""
        return _begin(self._index, {**self._head, "input": {}})

    def push(self, text: str) -> list[Json]:
        """Return the events of more of the input's JSON text."""
        return self._written(self._writer.push(text))

    def end(self) -> list[Json]:
        """Return the last events of the block."""
        return [*self._written(self._writer.flush()), _end(self._index)]

    def whole(self) -> Json:
        """Return the block, with its input as JSON text."""
        return {**self._head, "input": msgspec.Raw(self._input.encode())}

    def _written(self, text: str) -> list[Json]:
        if not text:
            return []
        self._input += text
        return [_delta(self._index, {"type": "input_json_delta", "partial_json": text})]


Block = TextBlock | ThinkingBlock | ToolUseBlock


def _begin(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _end(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}
