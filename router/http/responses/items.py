"""The items of a response's output: their events while they are written, and the whole items."""

from typing import Any, Literal

from router.http.bodies.body import Json
from text.parsing.text_argument import TextArgument

Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem:
    """A message with text as its only part.

    place: ``item_id`` and ``output_index``, which every event has. logprobs: None if they are not shown.
    """

    def __init__(self, place: Json, logprobs: list[Json] | None = None) -> None:
        self._place = place
        self._text = ""
        self._logprobs = logprobs or []

    def begin(self) -> list[Json]:
        """Return the events that begin the item."""
        return _begin_with_part(self._place, self.whole("in_progress"), self._part())

    def push(self, text: str, logprobs: list[Json]) -> Json:
        """Return the event of more text. logprobs: of its tokens."""
        self._text += text
        self._logprobs += logprobs
        return self._event("output_text.delta", delta=text, logprobs=logprobs)

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the whole item."""
        return [
            self._event("output_text.done", text=self._text, logprobs=self._logprobs),
            self._event("content_part.done", part=self._part()),
            _event("output_item.done", output_index=self._place["output_index"], item=self.whole(status)),
        ]

    def whole(self, status: Status) -> Json:
        """Return the item; in progress it has no part yet."""
        content = [self._part()] if status != "in_progress" else []
        return {
            "id": self._place["item_id"],
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _part(self) -> Json:
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _event(self, kind: str, **more: Any) -> Json:
        return _event(kind, **self._place, content_index=0, **more)


class ReasoningItem:
    """Reasoning in full, without a summary."""

    def __init__(self, place: Json) -> None:
        self._place = place
        self._text = ""

    def begin(self) -> list[Json]:
        """Return the events that begin the item."""
        return _begin_with_part(self._place, self.whole("in_progress"), self._part())

    def push(self, text: str) -> Json:
        """Return the event of more text."""
        self._text += text
        return self._event("reasoning_text.delta", delta=text)

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the whole item."""
        return [
            self._event("reasoning_text.done", text=self._text),
            self._event("content_part.done", part=self._part()),
            _event("output_item.done", output_index=self._place["output_index"], item=self.whole(status)),
        ]

    def whole(self, status: Status) -> Json:
        """Return the item; in progress it has no part yet."""
        content = [self._part()] if status != "in_progress" else []
        return {
            "id": self._place["item_id"],
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": status,
        }

    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self._text}

    def _event(self, kind: str, **more: Any) -> Json:
        return _event(kind, **self._place, content_index=0, **more)


class CallItem:
    """A call of a function. head: its name, and its namespace if it has one."""

    def __init__(self, place: Json, call_id: str, head: Json) -> None:
        self._place = place
        self._call_id = call_id
        self._head = head
        self._arguments = ""

    def begin(self) -> list[Json]:
        """Return the event that begins the item."""
        item = self.whole("in_progress")
        return [_event("output_item.added", output_index=self._place["output_index"], item=item)]

    def push(self, text: str) -> list[Json]:
        """Return the events of more text of the arguments."""
        self._arguments += text
        return [_event("function_call_arguments.delta", **self._place, delta=text)]

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the whole item."""
        done = {"name": self._head["name"], "arguments": self._arguments}
        return [
            _event("function_call_arguments.done", **self._place, **done),
            _event("output_item.done", output_index=self._place["output_index"], item=self.whole(status)),
        ]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return {
            "id": self._place["item_id"],
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            **self._head,
            "arguments": self._arguments,
        }


class CustomCallItem:
    """A call of a custom tool: the model writes its text as the only argument of a function. head: as of CallItem."""

    def __init__(self, place: Json, call_id: str, head: Json) -> None:
        self._place = place
        self._call_id = call_id
        self._head = head
        self._argument = TextArgument()
        self._input = ""

    def begin(self) -> list[Json]:
        """Return the event that begins the item."""
        item = self.whole("in_progress")
        return [_event("output_item.added", output_index=self._place["output_index"], item=item)]

    def push(self, text: str) -> list[Json]:
        """Return the events of more JSON text of the argument."""
        return self._written(self._argument.push(text))

    def end(self, status: Status) -> list[Json]:
        """Return the last events, which repeat the whole item."""
        return [
            *self._written(self._argument.flush()),
            _event("custom_tool_call_input.done", **self._place, input=self._input),
            _event("output_item.done", output_index=self._place["output_index"], item=self.whole(status)),
        ]

    def whole(self, status: Status) -> Json:
        """Return the item."""
        return {
            "id": self._place["item_id"],
            "type": "custom_tool_call",
            "status": status,
            "call_id": self._call_id,
            **self._head,
            "input": self._input,
        }

    def _written(self, text: str) -> list[Json]:
        self._input += text
        return [_event("custom_tool_call_input.delta", **self._place, delta=text)] if text else []


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


def _begin_with_part(place: Json, item: Json, part: Json) -> list[Json]:
    return [
        _event("output_item.added", output_index=place["output_index"], item=item),
        _event("content_part.added", **place, content_index=0, part=part),
    ]


def _event(kind: str, **fields: Any) -> Json:
    return {"type": f"response.{kind}", **fields}
