"""The parts of OpenAI's objects that chats and text completions have in common."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import partial, reduce
from operator import add

import msgspec

from router.answers.answer import Delta, Usage
from router.http.bodies.body import Json
from router.http.formatter import AnswerOptions
from router.http.generation.logprobs import LogprobsFormatter, merged
from router.http.generation.text_chunks import TextChunks


class OpenAIFormatter(ABC):
    """Writes heads, choices and usage. Owns the log probabilities and the usage of the choices so far."""

    def __init__(self, options: AnswerOptions, logprobs: Callable[[], LogprobsFormatter]) -> None:
        self._options = options
        self._shows_tokens = options.logprobs or options.return_token_ids
        """Tokens have something to show besides their text."""
        self._logprobs: defaultdict[int, LogprobsFormatter] = defaultdict(logprobs)
        self._usages: list[Usage] = []
        self._texts: dict[int, TextChunks] = {}

    @abstractmethod
    def _with_text(self, index: int, text: str) -> Json:
        """Return the chunk of a choice that has nothing but text."""

    def _text_chunk(self, index: int, text: str) -> msgspec.Raw:
        """Return the JSON of ``_with_text``."""
        if index not in self._texts:
            self._texts[index] = TextChunks(partial(self._with_text, index))
        return self._texts[index].with_text(text)

    def _head(self, kind: str) -> Json:
        options = self._options
        return {"id": options.request_id, "object": kind, "created": options.created, "model": options.model}

    def _choice(self, deltas: list[Delta], content: Json) -> Json:
        """Return a choice with ``content`` and the details of its deltas that were asked for."""
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
        """Return a choice's last chunks with its timings and, after the last choice, the usage, if asked for."""
        if self._options.timings and delta.timings:
            chunks[-1]["kvbaton"] = {"timings": delta.timings.as_dict()}
        self._usages += [delta.usage] if delta.usage else []
        if self._options.include_usage and len(self._usages) == self._options.num_choices:
            chunks.append({**self._head(kind), "choices": [], "usage": usage_object(_sum(self._usages))})
        return chunks

    def _whole(self, kind: str, deltas: list[Delta], choice: Callable[[list[Delta]], Json]) -> Json:
        """Return the response object with every choice; the timings are those of the slowest one."""
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


def usage_object(usage: Usage) -> Json:
    """Return OpenAI's ``usage``; ``prompt_tokens_details`` is null if nothing was cached."""
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


def _sum(usages: list[Usage]) -> Usage:
    return reduce(add, usages)
