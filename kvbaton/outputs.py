"""The outputs of ``LLM``, with vLLM's names."""

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
    "length". stop_reason: the stop string or stop token id that ended it; None for the model's own end token; "grammar" with
    "length" if the grammar allowed no further token.
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
    latency breakdown in seconds; of several answers that of the slowest. prompt_logprobs: None for the first token, then the
    candidates by token id, the prompt's own first; None unless requested.
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


def completions(deltas: Sequence[Delta], tokenizer: Tokenizer) -> list[CompletionOutput]:
    """Assemble the answers from their deltas, in the order of their indices."""
    indexes = sorted({delta.index for delta in deltas})
    return [_completion([d for d in deltas if d.index == index], tokenizer) for index in indexes]


def prompt_logprobs(deltas: Sequence[Delta], tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """Return the log probabilities of the prompt; None unless requested."""
    prompt = next((delta.prompt for delta in deltas if delta.prompt), None)
    if prompt is None or not prompt.logprobs:
        return None
    return [None, *(_candidates(token, tokenizer) for token in prompt.tokens[1:])]


def _completion(deltas: Sequence[Delta], tokenizer: Tokenizer) -> CompletionOutput:
    tokens = [token for delta in deltas for token in delta.tokens]
    found = [token.logprobs.logprob for token in tokens if token.logprobs]
    last = deltas[-1]
    return CompletionOutput(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token.token_id for token in tokens],
        cumulative_logprob=sum(found) if found else None,
        logprobs=[_candidates(token, tokenizer) for token in tokens] if found else None,
        finish_reason=last.finish_reason.value if last.finish_reason else None,
        stop_reason=last.stop_reason,
    )


def _candidates(token: Token, tokenizer: Tokenizer) -> dict[int, Logprob]:
    ranked = token.logprobs.candidates() if token.logprobs else ()
    return {one: Logprob(logprob, rank, _written(one, tokenizer)) for one, logprob, rank in ranked}


def _written(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")
