"""OpenAI's ``response`` object and the events of its stream, which are made of the same items."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from contract.outputs import FinishReason
from router.answers.answer import Delta, Usage
from router.http.bodies.body import Json
from router.http.exchange import AnswerOptions
from router.http.fields.offered_tools import OfferedTools
from router.tokens.delivery import Token
from text.parsing.parser import CallArguments, CallBegin, Content, Piece, Reasoning
from text.tools import TextArgument

Status = Literal["in_progress", "completed", "incomplete"]


class _Item(ABC):
    """One item of the output. place: ``item_id`` and ``output_index``, which every event has."""

    def __init__(self, place: Json) -> None:
        self._place = place

    def begin(self) -> list[Json]:
        """Return the events that begin the item."""
        return [self._item_event("added", "in_progress")]

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the whole item."""
        return [self._item_event("done", status)]

    @abstractmethod
    def whole(self, status: Status) -> Json:
        """Return the item."""

    def _item_event(self, kind: str, status: Status) -> Json:
        place = self._place["output_index"]
        return _event(f"output_item.{kind}", output_index=place, item=self.whole(status))


class _PartItem(_Item):
    """An item with a text as its only part, which it does not have before it has ended."""

    def __init__(self, place: Json) -> None:
        super().__init__(place)
        self._text = ""

    def begin(self) -> list[Json]:
        """Return the events that begin the item and its part."""
        return [*super().begin(), self._part_event("content_part.added", part=self._part())]

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the part and the item."""
        return [self._part_event("content_part.done", part=self._part()), *super().end(status)]

    @abstractmethod
    def _part(self) -> Json:
        """Return the part with the text so far."""

    def _content(self, status: Status) -> list[Json]:
        return [self._part()] if status != "in_progress" else []

    def _part_event(self, kind: str, **more: Any) -> Json:
        return _event(kind, **self._place, content_index=0, **more)


class MessageItem(_PartItem):
    """A message."""

    def __init__(self, place: Json) -> None:
        super().__init__(place)
        self._logprobs: list[Json] = []

    def push(self, text: str, logprobs: list[Json]) -> Json:
        """Return the event of more text. logprobs: of its tokens."""
        self._text += text
        self._logprobs += logprobs
        return self._part_event("output_text.delta", delta=text, logprobs=logprobs)

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the text, the part and the item."""
        done = self._part_event("output_text.done", text=self._text, logprobs=self._logprobs)
        return [done, *super().end(status)]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return {
            "id": self._place["item_id"],
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._content(status),
        }

    def _part(self) -> Json:
        logprobs = list(self._logprobs)  # a copy: an event keeps the state of its moment
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": logprobs}


class ReasoningItem(_PartItem):
    """Reasoning in full, without a summary."""

    def push(self, text: str) -> Json:
        """Return the event of more text."""
        self._text += text
        return self._part_event("reasoning_text.delta", delta=text)

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the text, the part and the item."""
        return [self._part_event("reasoning_text.done", text=self._text), *super().end(status)]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return {
            "id": self._place["item_id"],
            "type": "reasoning",
            "summary": [],
            "content": self._content(status),
            "status": status,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self._text}


class CallItem(_Item):
    """A call of a function. head: its name, and its namespace if it has one."""

    def __init__(self, place: Json, call_id: str, head: Json) -> None:
        super().__init__(place)
        self._call_id = call_id
        self._head = head
        self._text = ""

    def push(self, text: str) -> list[Json]:
        """Return the events of more JSON text of the arguments."""
        self._text += text
        return [_event("function_call_arguments.delta", **self._place, delta=text)]

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the arguments and the item."""
        done = {"name": self._head["name"], "arguments": self._text}
        return [_event("function_call_arguments.done", **self._place, **done), *super().end(status)]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return self._call("function_call", status, arguments=self._text)

    def _call(self, kind: str, status: Status, **text: str) -> Json:
        item = {"id": self._place["item_id"], "type": kind, "status": status, "call_id": self._call_id}
        return {**item, **self._head, **text}


class CustomCallItem(CallItem):
    """A call of a custom tool: the model writes its text as the only argument of a function."""

    def __init__(self, place: Json, call_id: str, head: Json) -> None:
        super().__init__(place, call_id, head)
        self._argument = TextArgument()

    def push(self, text: str) -> list[Json]:
        """Return the events of more JSON text of the argument."""
        return self._written(self._argument.push(text))

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the text and the item."""
        events = self._written(self._argument.flush())
        done = _event("custom_tool_call_input.done", **self._place, input=self._text)
        return [*events, done, self._item_event("done", status)]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return self._call("custom_tool_call", status, input=self._text)

    def _written(self, text: str) -> list[Json]:
        self._text += text
        return [_event("custom_tool_call_input.delta", **self._place, delta=text)] if text else []


OutputItem = MessageItem | ReasoningItem | CallItem


def _event(kind: str, **fields: Any) -> Json:
    return {"type": f"response.{kind}", **fields}


TextItem = TypeVar("TextItem", MessageItem, ReasoningItem)
TokenLogprobs = Callable[[list[Token]], list[Json]]


class ResponseFormatter:
    """Writes responses. Owns the output so far. An item ends when one of another kind, or another call, begins.

    echo: the fields that the response repeats from its request. logprobs: tokens → their entries; None to leave them out.
    A token that has no text yet is reported with the text that it becomes a part of; tokens of reasoning and calls are not
    reported. offered: the request's tools, by which a call is one of a function, a custom tool or a namespace.
    """

    def __init__(
        self, options: AnswerOptions, echo: Json, logprobs: TokenLogprobs | None, offered: OfferedTools
    ) -> None:
        self._options = options
        self._offered = offered
        self._echo = echo
        self._logprobs = logprobs
        self._output: list[Json] = []
        self._item: OutputItem | None = None
        self._waiting: list[Token] = []
        self._num_events = 0

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the response of an answer that is not streamed."""
        *_, last = [event for delta in deltas for event in self.chunks(delta)]
        return dict(last["response"])

    def chunks(self, delta: Delta) -> list[Json]:
        """Return the events of a delta, each with its type and number."""
        events: list[Json] = []
        if not self._num_events:
            begun = self._response("in_progress")
            events += [_event("created", response=begun), _event("in_progress", response=begun)]
        # the tokens of reasoning are not reported, also not with the first text behind it
        if delta.num_reasoning_tokens:
            self._waiting = []
        self._waiting += delta.tokens[delta.num_reasoning_tokens :] if self._logprobs else ()
        for piece in delta.pieces:
            events += self._push(piece)
        if delta.finish_reason:
            events += self._finish(delta, delta.finish_reason)
        return self._numbered(events)

    def failed(self, error: Json) -> list[Json]:
        """Return the last events of a stream that ends with an error. error: OpenAI's error object."""
        inner = error["error"]
        code = "rate_limit_exceeded" if inner["type"] == "rate_limit_error" else "server_error"
        # an item that has begun was announced, so it is a part of the failed response
        output = self._output + ([self._item.whole("incomplete")] if self._item else [])
        failed = self._response("failed", output, error={"code": code, "message": inner["message"]})
        event = {name: inner[name] for name in ("message", "param")}
        return self._numbered(
            [
                {"type": "error", **event, "code": inner["code"] or code},
                _event("failed", response=failed),
            ]
        )

    def _push(self, piece: Piece) -> list[Json]:
        match piece:
            case Content():
                tokens = self._waiting
                self._waiting = []
                logprobs = self._logprobs(tokens) if self._logprobs else []
                events, message = self._enter(MessageItem, "msg")
                return [*events, message.push(piece.text, logprobs)]
            case Reasoning():
                events, reasoning = self._enter(ReasoningItem, "rs")
                return [*events, reasoning.push(piece.text)]
            case CallBegin():
                self._waiting = []
                namespace, name = self._offered.namespaces.get(piece.name, (None, piece.name))
                head = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
                is_custom = piece.name in self._offered.custom
                kind = CustomCallItem if is_custom else CallItem
                return self._begin(kind(self._place("ctc" if is_custom else "fc"), piece.call_id, head))
            case CallArguments():
                self._waiting = []
                if not isinstance(self._item, CallItem):
                    raise AssertionError("arguments without a call")
                return self._item.push(piece.text)

    def _enter(self, kind: type[TextItem], prefix: str) -> tuple[list[Json], TextItem]:
        """Return the events that open an item of this kind, and the item; the open one if it is of this kind."""
        if isinstance(self._item, kind):
            return [], self._item
        item = kind(self._place(prefix))
        return self._begin(item), item

    def _place(self, prefix: str) -> Json:
        """Return the next item's index and id; the id is the response's with another prefix and the index."""
        index = len(self._output) + (self._item is not None)
        _, _, unique = self._options.request_id.partition("_")
        return {"item_id": f"{prefix}_{unique}{index:02x}", "output_index": index}

    def _begin(self, item: OutputItem) -> list[Json]:
        events = self._end("completed")
        self._item = item
        return events + item.begin()

    def _end(self, status: Status) -> list[Json]:
        if self._item is None:
            return []
        item = self._item
        self._item = None
        events = item.end(status)
        self._output.append(item.whole(status))
        return events

    def _finish(self, delta: Delta, reason: FinishReason) -> list[Json]:
        # An empty answer is a message without text.
        events = [] if self._item else self._begin(MessageItem(self._place("msg")))
        if reason is FinishReason.STOP:
            events += self._end("completed")
            response = self._response("completed", self._output, completed_at=int(time.time()))
        else:
            events += self._end("incomplete")
            cut_by = delta.stop_reason or "max_output_tokens"  # a grammar may cut it off, too
            shown = cut_by if reason is FinishReason.LENGTH else reason.value
            response = self._response("incomplete", self._output, incomplete_details={"reason": shown})
        if delta.usage:
            response["usage"] = _usage_object(delta.usage)
        if self._options.timings and delta.timings:
            response["kvbaton"] = {"timings": delta.timings.as_dict()}
        return [*events, _event(response["status"], response=response)]

    def _response(self, status: str, output: list[Json] | None = None, **more: Any) -> Json:
        return {
            "id": self._options.request_id,
            "object": "response",
            "created_at": self._options.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._options.model,
            "output": output or [],
            "usage": None,
            **self._echo,
            **more,
        }

    def _numbered(self, events: list[Json]) -> list[Json]:
        numbered = [
            {**event, "sequence_number": number} for number, event in enumerate(events, self._num_events)
        ]
        self._num_events += len(events)
        return numbered


def _usage_object(usage: Usage) -> Json:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
