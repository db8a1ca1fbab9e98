"""Anthropic's ``message`` object and the events of its stream, which are made of the same content blocks."""

from typing import Any, ClassVar, TypeVar

import msgspec

from contract.outputs import FinishReason
from router.answers.answer import Delta, Usage
from router.http.bodies.body import Json
from router.http.exchange import AnswerOptions
from text.parsing.mended import ArgumentsWriter
from text.parsing.parser import CallArguments, CallBegin, Content, Piece, Reasoning

_CALL_PREFIX = "toolu_"
"""Beginning of a call's id in this API."""


class _TextualBlock:
    """A block of one text. kind: its type, and the name of the field with the text. rest: its other fields."""

    kind = ""
    rest: ClassVar[Json] = {}

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""

    def begin(self) -> Json:
        """Return the event that begins the block."""
        return _begin(self._index, self.whole())

    def push(self, text: str) -> list[Json]:
        """Return the events of more text."""
        self._text += text
        return [_delta(self._index, {"type": f"{self.kind}_delta", self.kind: text})]

    def end(self) -> list[Json]:
        """Return the last events of the block."""
        return [_end(self._index)]

    def whole(self) -> Json:
        """Return the block."""
        return {"type": self.kind, self.kind: self._text, **self.rest}


class TextBlock(_TextualBlock):
    """Text for the reader."""

    kind = "text"


class ThinkingBlock(_TextualBlock):
    """Reasoning. The signature is empty: the block is accepted without one when it is sent back."""

    kind = "thinking"
    rest: ClassVar[Json] = {"signature": ""}


class ToolUseBlock:
    """A call. Its input is always an object: other output of the model is repaired (``text.parsing.mended``)."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._index = index
        form, _, rest = call_id.partition("_")
        # ids of another form are not changed
        shown_id = f"{_CALL_PREFIX}{rest}" if form == "call" and rest else call_id
        self._head = {"type": "tool_use", "id": shown_id, "name": name}
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


STOP_REASONS = (
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
)
TextualBlock = TypeVar("TextualBlock", TextBlock, ThinkingBlock)


class MessageFormatter:
    """Writes messages. Owns the content so far. A block ends when one of another kind, or another call, begins.

    max_tokens: the client's limit. A shorter answer that ended because the model's context was full has its own stop reason.
    """

    def __init__(self, options: AnswerOptions, max_tokens: int) -> None:
        self._options = options
        self._max_tokens = max_tokens
        self._content: list[Json] = []
        self._block: Block | None = None
        self._has_begun = False
        self._has_calls = False
        self._message: Json = {}

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the message of an answer that is not streamed."""
        for delta in deltas:
            # by the events' own code, so that both forms of an answer are equal
            self.chunks(delta)
        return self._message

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the events of a delta."""
        events: list[Json] = []
        if not self._has_begun:
            self._has_begun = True
            num_tokens = len(delta.prompt.token_ids) if delta.prompt else 0
            usage = {"input_tokens": num_tokens, "output_tokens": 0}
            # the ping is what Anthropic's streams begin with
            events += [{"type": "message_start", "message": self._object(usage=usage)}, {"type": "ping"}]
        for piece in delta.pieces:
            events += self._push(piece)
        if delta.finish_reason:
            events += self._finish(delta, delta.finish_reason)
        return events

    def _push(self, piece: Piece) -> list[Json]:
        match piece:
            case Content():
                begun, text = self._enter(TextBlock)
                return begun + text.push(piece.text)
            case Reasoning():
                begun, thinking = self._enter(ThinkingBlock)
                return begun + thinking.push(piece.text)
            case CallBegin():
                self._has_calls = True
                ended = self._end()
                self._block = ToolUseBlock(len(self._content), piece.call_id, piece.name)
                return [*ended, self._block.begin()]
            case CallArguments():
                if not isinstance(self._block, ToolUseBlock):
                    raise AssertionError("arguments without a call")
                return self._block.push(piece.text)

    def _enter(self, kind: type[TextualBlock]) -> tuple[list[Json], TextualBlock]:
        """Return the events that open a block of this kind, and the block; the open one if it is of this kind."""
        if isinstance(self._block, kind):
            return [], self._block
        ended: list[Json] = self._end()
        block = kind(len(self._content))
        self._block = block
        return [*ended, block.begin()], block

    def _end(self) -> list[Json]:
        if self._block is None:
            return []
        block = self._block
        self._block = None
        events = block.end()
        self._content.append(block.whole())
        return events

    def _finish(self, delta: Delta, reason: FinishReason) -> list[Json]:
        events = self._end()
        is_cut = reason is FinishReason.LENGTH and delta.stop_reason is not None  # by its grammar
        stopped = delta.stop_reason if isinstance(delta.stop_reason, str) and not is_cut else None
        usage = _usage_object(delta.usage) if delta.usage else {"input_tokens": 0, "output_tokens": 0}
        match reason:
            case FinishReason.LENGTH:
                is_limit = is_cut or usage["output_tokens"] >= self._max_tokens
                shown = "max_tokens" if is_limit else "model_context_window_exceeded"
            case FinishReason.ABORT:
                shown = "pause_turn"
            case _ if stopped is not None:
                shown = "stop_sequence"
            case _:
                shown = "tool_use" if self._has_calls else "end_turn"
        ended = {"stop_reason": shown, "stop_sequence": stopped}
        self._message = self._object(**ended, usage=usage)
        if self._options.timings and delta.timings:
            self._message["kvbaton"] = {"timings": delta.timings.as_dict()}
        return [
            *events,
            {"type": "message_delta", "delta": ended, "usage": usage},
            {"type": "message_stop"},
        ]

    def _object(self, *, usage: Json, **more: Any) -> Json:
        return {
            "id": self._options.request_id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": list(self._content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, **usage},
            **more,
        }


def _usage_object(usage: Usage) -> Json:
    """Return Anthropic's usage, which counts computed and cached tokens of the prompt separately."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }
