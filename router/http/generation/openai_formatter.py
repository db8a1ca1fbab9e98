"""The parts of OpenAI's objects that chats and text completions have in common: heads, choices, usage, log probabilities."""

import secrets
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import msgspec

from router.answers.answer import Delta, Prompt, Usage
from router.http.bodies.body import Json
from router.http.exchange import AnswerOptions
from router.http.streaming import data_event
from router.tokens.delivery import Token
from text.tokenizer import Tokenizer

_PLACE = secrets.token_hex(16)
"""The text in the place of the real one. No other value of a chunk contains it."""


class OpenAIFormatter(ABC):
    """Writes heads, choices and usage. Owns the log probabilities and the usage of the choices so far."""

    def __init__(self, options: AnswerOptions, logprobs: "Callable[[], LogprobsFormatter]") -> None:
        self._options = options
        # every object begins with these fields, in this order; its kind is filled in
        self._head: Json = {
            "id": options.request_id,
            "object": "",
            "created": options.created,
            "model": options.model,
        }
        self._shows_tokens = options.logprobs or options.return_token_ids
        """Tokens have something to show besides their text."""
        self._logprobs: defaultdict[int, LogprobsFormatter] = defaultdict(logprobs)
        self._usages: list[Usage] = []
        self._around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and behind the text in a chunk's event, by choice."""

    @abstractmethod
    def _with_text(self, index: int, text: str) -> Json:
        """Return the chunk of a choice that has nothing but text."""

    def _text_event(self, index: int, text: str) -> bytes:
        """Return the event of ``_with_text``."""
        # the text is the only part of these chunks that changes, and every token of a stream passes here: what is around it
        # is encoded once for each choice
        if (around := self._around.get(index)) is None:
            place = msgspec.json.encode(_PLACE)
            before, after = data_event(self._with_text(index, _PLACE)).split(place)
            around = self._around[index] = before, after
        return around[0] + msgspec.json.encode(text) + around[1]

    def _choice(self, deltas: list[Delta], content: Json) -> Json:
        """Return a choice with ``content`` and the details of its deltas that were asked for."""
        index = deltas[-1].index
        logprobs = None
        if self._options.logprobs:
            logprobs = merged([self._logprobs[index].entry(delta.tokens) for delta in deltas])
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = [token.token_id for delta in deltas for token in delta.tokens]
        return choice

    def _chunk(self, kind: str, choice: Json) -> Json:
        chunk = {**self._head, "object": kind, "choices": [choice]}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _finished(self, kind: str, chunks: list[Json], delta: Delta) -> list[Json]:
        """Return a choice's last chunks with its timings and, after the last choice, the usage, if asked for."""
        if self._options.timings and delta.timings:
            chunks[-1]["kvbaton"] = {"timings": delta.timings.as_dict()}
        self._usages += [delta.usage] if delta.usage else []
        # one usage for all choices, behind the last of them to end
        if self._options.include_usage and len(self._usages) == self._options.num_choices:
            chunks.append(
                {
                    **self._head,
                    "object": kind,
                    "choices": [],
                    "usage": usage_object(reduce(add, self._usages)),
                }
            )
        return chunks

    def _whole(self, kind: str, deltas: list[Delta], choice: Callable[[list[Delta]], Json]) -> Json:
        """Return the response object with every choice; the timings are those of the slowest one."""
        by_choice: defaultdict[int, list[Delta]] = defaultdict(list)
        for delta in deltas:
            by_choice[delta.index].append(delta)
        choices = [choice(by_choice[index]) for index in sorted(by_choice)]
        whole = {**self._head, "object": kind, "choices": choices}
        if usages := [delta.usage for delta in deltas if delta.usage]:
            whole["usage"] = usage_object(reduce(add, usages))
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


class ChatLogprobs:
    """``{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entry(self, tokens: list[Token]) -> dict[str, Any]:
        """Return the object for these tokens."""
        return {"content": [self._position(token) for token in tokens], "refusal": None}

    def _position(self, token: Token) -> dict[str, Any]:
        found = token.logprobs
        top = zip(found.top_token_ids, found.top_logprobs, strict=True) if found else ()
        return {
            **self._candidate(token.token_id, found.logprob if found else 0.0),
            "top_logprobs": [self._candidate(token_id, logprob) for token_id, logprob in top],
        }

    def _candidate(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class LegacyLogprobs:
    r"""``{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`` of /v1/completions.

    A token that is only a part of a character is written as ``bytes:\xe2\x82``, as OpenAI does, so that two different
    parts differ.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entry(self, tokens: list[Token]) -> dict[str, Any]:
        """Return the object for these tokens."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            found = token.logprobs
            written = self._written(token.token_id)
            out["tokens"].append(written)
            out["token_logprobs"].append(found.logprob if found else None)
            out["text_offset"].append(token.text_offset)
            top = zip(found.top_token_ids, found.top_logprobs, strict=True) if found else ()
            best = {self._written(token_id): logprob for token_id, logprob in top}
            if found:
                # OpenAI lists the token that was chosen even if others are more likely
                best.setdefault(written, found.logprob)
            out["top_logprobs"].append(best if found else None)
        return out

    def _written(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


LogprobsFormatter = ChatLogprobs | LegacyLogprobs
"""Call ``entry`` in the order of the tokens."""


def prompt_logprobs(prompt: Prompt, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's format: null for the first token, then by token id the prompt's own token and the best ones."""
    listed: list[dict[str, Any] | None] = [None]
    for found in prompt.logprobs:
        entries = {}
        for one, value, rank in found.candidates():
            written = tokenizer.token_bytes(one).decode("utf-8", "replace")
            entries[str(one)] = {"logprob": value, "rank": rank, "decoded_token": written}
        listed.append(entries)
    return listed


def merged(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries of an answer's pieces as one; their lists are joined."""
    out: dict[str, Any] = {}
    for entry in entries:
        for name, value in entry.items():
            out[name] = out.get(name, []) + value if isinstance(value, list) else value
    return out
