"""Log probabilities in OpenAI's two formats, with the same entries in streams and whole answers."""

from typing import Any, Protocol

from router.answers.answer import Prompt
from router.tokens.delivery import Token
from text.tokenizer import Tokenizer


class LogprobsFormatter(Protocol):
    """Writes the ``logprobs`` of a choice or a chunk."""

    def entry(self, tokens: list[Token]) -> dict[str, Any]:
        """Return the object for these tokens; call it in the order of the tokens."""


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
                best.setdefault(written, found.logprob)
            out["top_logprobs"].append(best if found else None)
        return out

    def _written(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


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
