"""OpenAI's objects: what an answer looks like as a whole and in chunks, for chat and for text completions."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, Protocol

from contract.outputs import FinishReason
from router.answer import Delta, Usage
from router.http.echo import PromptView
from router.http.logprobs import ChatLogprobs, LegacyLogprobs, LogprobsShape, merged, prompt_logprobs
from router.http.message import message_deltas, whole_message
from text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """What a client wants to see of an answer.

    num_choices: how many there will be, each with a last delta of its own. num_chosen: of those to one prompt so many.
    """

    request_id: str
    model: str
    created: int
    num_choices: int = 1
    num_chosen: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    timings: bool = False
    prompt_logprobs: bool = False


def usage_object(usage: Usage) -> Json:
    """OpenAI's ``usage``; ``prompt_tokens_details`` is null where nothing was cached, the other details are left out."""
    cached = usage.num_cached_tokens
    reasoning = usage.num_reasoning_tokens
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        **details,
    }


class Shape(Protocol):
    """How a response is written. ``chunks`` is called for every delta of a stream, in order, or ``whole`` once."""

    def chunks(self, delta: Delta) -> list[Json]:
        """The stream's objects for one delta; none while there is nothing to show."""

    def whole(self, deltas: list[Delta]) -> Json:
        """The response object of an answer that is not streamed; each choice's last delta has usage and timings."""


class _OpenAIShape:
    """What both endpoints have in common."""

    def __init__(self, options: AnswerOptions, logprobs: Callable[[], LogprobsShape]) -> None:
        self._options = options
        self._logprobs: defaultdict[int, LogprobsShape] = defaultdict(logprobs)
        self._usages: list[Usage] = []

    def _head(self, kind: str) -> Json:
        options = self._options
        return {"id": options.request_id, "object": kind, "created": options.created, "model": options.model}

    def _has_detail(self, delta: Delta) -> bool:
        """There is something to show of its tokens, beside the text."""
        return bool(delta.tokens) and (self._options.logprobs or self._options.return_token_ids)

    def _choice(self, deltas: list[Delta], content: Json) -> Json:
        """A choice with ``content`` and what else of its deltas was asked for."""
        index = deltas[-1].index
        entries = [self._logprobs[index].entry(delta.tokens) for delta in deltas if self._options.logprobs]
        choice = {
            "index": index,
            **content,
            "logprobs": merged(entries) if entries else None,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = [token.token_id for delta in deltas for token in delta.tokens]
        return choice

    def _chunk(self, kind: str, choice: Json) -> Json:
        chunk = {**self._head(kind), "choices": [choice]}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _finished(self, kind: str, chunks: list[Json], delta: Delta) -> list[Json]:
        """The chunks of a choice's last delta: its timings, and behind the last choice the usage, where asked for."""
        if self._options.timings and delta.timings:
            chunks[-1]["kvbaton"] = {"timings": delta.timings.as_dict()}
        self._usages += [delta.usage] if delta.usage else []
        if self._options.include_usage and len(self._usages) == self._options.num_choices:
            chunks.append({**self._head(kind), "choices": [], "usage": usage_object(_sum(self._usages))})
        return chunks

    def _whole(self, kind: str, deltas: list[Delta], choice: Callable[[list[Delta]], Json]) -> Json:
        """Every choice by its deltas; the timings are those of the one that took longest."""
        by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in deltas:
            by_choice[delta.index].append(delta)
        whole = {**self._head(kind), "choices": [choice(by_choice[index]) for index in sorted(by_choice)]}
        if usages := [delta.usage for delta in deltas if delta.usage]:
            whole["usage"] = usage_object(_sum(usages))
        timings = [delta.timings for delta in deltas if delta.timings]
        if self._options.timings and timings:
            longest = max(timings, key=lambda one: one.end_to_end)
            whole["kvbaton"] = {"timings": longest.as_dict()}
        return whole


class CompletionShape(_OpenAIShape):
    """``text_completion``; its last chunk carries the last text and the finish reason."""

    _KIND = "text_completion"

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer, view: PromptView) -> None:
        super().__init__(options, lambda: LegacyLogprobs(tokenizer))
        self._tokenizer = tokenizer
        self._view = view

    def chunks(self, delta: Delta) -> list[Json]:
        """One chunk for text or the end."""
        delta = self._shown(delta)
        if not delta.finish_reason:
            return [self._piece([delta])] if delta.text or self._has_detail(delta) else []
        return self._finished(self._KIND, [self._piece([delta])], delta)

    def whole(self, deltas: list[Delta]) -> Json:
        """The response object."""
        return self._whole(self._KIND, [self._shown(delta) for delta in deltas], self._whole_choice)

    def _shown(self, delta: Delta) -> Delta:
        return self._view.shown(delta, self._tokenizer)

    def _whole_choice(self, deltas: list[Delta]) -> Json:
        choice = self._choice(deltas, {"text": "".join(delta.text for delta in deltas)})
        is_asked = self._options.prompt_logprobs
        found = prompt_logprobs(deltas[0].prompt, self._tokenizer) if is_asked and deltas[0].prompt else None
        return {**choice, "prompt_logprobs": found}

    def _piece(self, deltas: list[Delta]) -> Json:
        return self._chunk(self._KIND, self._choice(deltas, {"text": deltas[0].text}))


class ChatShape(_OpenAIShape):
    """``chat.completion``; the role comes in the first chunk only, the finish reason in a last one without text.

    Content, reasoning, a call's name and its arguments come in chunks of their own. names_call: the client has named the
    function to be called, which OpenAI counts as a plain end.
    """

    _CHUNK = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer, *, names_call: bool = False) -> None:
        super().__init__(options, lambda: ChatLogprobs(tokenizer))
        self._tokenizer = tokenizer
        self._names_call = names_call
        self._begun: set[int] = set()
        self._called: set[int] = set()

    def chunks(self, delta: Delta) -> list[Json]:
        """The role chunk at first, one for each kind of thing in the delta, one for the end."""
        out = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            out.append(self._bare({"role": "assistant", "content": ""}, Delta(index=delta.index)))
        parts = message_deltas(delta)
        if not parts and self._has_detail(delta):
            parts = [{"content": ""}]
        for number, part in enumerate(parts):
            piece = Delta(index=delta.index, tokens=delta.tokens)
            out.append(
                self._piece(piece, part) if number == 0 else self._bare(part, Delta(index=delta.index))
            )
        if delta.calls:
            self._called.add(delta.index)
        if not delta.finish_reason:
            return out
        return self._finished(self._CHUNK, [*out, self._bare({}, delta)], delta)

    def whole(self, deltas: list[Delta]) -> Json:
        """The response object."""
        whole = self._whole("chat.completion", deltas, self._whole_choice)
        if self._options.prompt_logprobs and deltas[0].prompt:
            whole["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt, self._tokenizer)
        return whole

    def _whole_choice(self, deltas: list[Delta]) -> Json:
        has_calls = any(delta.calls for delta in deltas)
        choice = self._choice(deltas, {"message": whole_message(deltas)})
        return {**choice, "finish_reason": _finish_reason(deltas[-1], has_calls and not self._names_call)}

    def _piece(self, delta: Delta, content: Json) -> Json:
        return self._chunk(self._CHUNK, self._choice([delta], {"delta": content}))

    def _bare(self, delta_object: Json, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "delta": delta_object,
            "logprobs": None,
            "finish_reason": _finish_reason(delta, delta.index in self._called and not self._names_call),
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        return self._chunk(self._CHUNK, choice)


def _finish_reason(delta: Delta, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and delta.finish_reason is FinishReason.STOP else delta.finish_reason


def _sum(usages: list[Usage]) -> Usage:
    return reduce(add, usages)
