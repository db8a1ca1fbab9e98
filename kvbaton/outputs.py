"""The outputs of ``LLM`` and ``Engine``, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.answers.answer import Delta
from router.answers.timings import Timings
from router.tokens.delivery import Token
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One token at one position of an answer. rank: 1 is the most likely token. decoded_token: its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One answer.

    token_ids: its tokens, including the one that ended it. cumulative_logprob, logprobs: the sum over its tokens, and
    for each position the candidates by token id, the sampled one first; None unless requested. finish_reason: "stop" or
    "length"; None while it is not complete. stop_reason: the stop string or stop token id that ended it; None for the
    model's own end token; "grammar" with "length" if the grammar allowed no further token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt.

    prompt: its text; None if it was given as token ids. num_cached_tokens: prompt tokens whose KV was cached. metrics: the
    latency breakdown in seconds; of several answers that of the slowest. finished: False for answers that ``Engine.step``
    will continue. prompt_logprobs: None for the first token, then the candidates by token id, the prompt's own first; None
    unless requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: Timings
    num_cached_tokens: int
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True)
class EmbeddingOutput:
    """A vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, kw_only=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt. num_cached_tokens: as in ``RequestOutput``."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
    finished: bool = True


class AnswerSoFar:
    """Assembles one answer from its deltas."""

    def __init__(self, index: int, tokenizer: Tokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._text = ""
        self._token_ids: list[int] = []
        self._found: list[float] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._last = Delta()

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        self._text += delta.text
        for token in delta.tokens:
            self._token_ids.append(token.token_id)
            self._logprobs.append(_candidates(token, self._tokenizer))
            if token.logprobs:
                self._found.append(token.logprobs.logprob)
        self._last = delta

    def completion(self) -> CompletionOutput:
        """Return the answer until now; deltas that are added later do not change it."""
        reason = self._last.finish_reason
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=list(self._token_ids),
            cumulative_logprob=sum(self._found) if self._found else None,
            logprobs=list(self._logprobs) if self._found else None,
            finish_reason=reason.value if reason else None,
            stop_reason=self._last.stop_reason,
        )


def completions(deltas: Sequence[Delta], tokenizer: Tokenizer) -> list[CompletionOutput]:
    """Assemble the answers from their deltas, in the order of their indices."""
    answers: dict[int, AnswerSoFar] = {}
    for delta in deltas:
        answers.setdefault(delta.index, AnswerSoFar(delta.index, tokenizer)).add(delta)
    return [answers[index].completion() for index in sorted(answers)]


def prompt_logprobs(deltas: Sequence[Delta], tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """Return the log probabilities of the prompt; None unless requested."""
    prompt = next((delta.prompt for delta in deltas if delta.prompt), None)
    if prompt is None or not prompt.logprobs:
        return None
    return [None, *(_candidates(token, tokenizer) for token in prompt.tokens[1:])]


def _candidates(token: Token, tokenizer: Tokenizer) -> dict[int, Logprob]:
    ranked = token.logprobs.candidates() if token.logprobs else ()
    # A token may be a part of a character: what it has no text for is shown as the replacement character.
    return {
        one: Logprob(logprob, rank, tokenizer.token_bytes(one).decode("utf-8", "replace"))
        for one, logprob, rank in ranked
    }
