"""The outputs of an engine: tokens, log probabilities, timings, and the end of a request."""

from enum import StrEnum

import msgspec

from contract.requests import EngineRequest, choice_key


class FinishReason(StrEnum):
    """The reason for the end of a choice. ``ERROR`` comes with an error kind and message; the others are successes.

    ``GRAMMAR``: no token may follow those so far, though the answer is not complete. Clients get ``EngineOutput.end``.
    """

    STOP = "stop"
    LENGTH = "length"
    GRAMMAR = "grammar"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the sampled token's own, its rank (1 = best), and the best alternatives.

    Natural logarithms of the model's distribution before temperature, top-k and top-p.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]

    def candidates(self) -> list[tuple[int, float, int]]:
        """Return (token id, log probability, rank) of the sampled token, then of the other best ones."""
        best = enumerate(zip(self.top_token_ids, self.top_logprobs, strict=True), 1)
        others = [(one, logprob, rank) for rank, (one, logprob) in best if one != self.token_id]
        return [(self.token_id, self.logprob, self.rank), *others]


class TransferReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The cost of fetching a prompt's KV from another worker.

    exposed_seconds: from the last published range to the last verified byte. hidden_seconds: time of copying before that.
    num_bytes: bytes transferred. num_pieces: number of copies, sequential or concurrent. copying_seconds: their total time.
    waiting_seconds: from the request for the KV to the last published range, which is the sender's part.
    """

    exposed_seconds: float = 0.0
    hidden_seconds: float = 0.0
    num_bytes: int = 0
    num_pieces: int = 0
    copying_seconds: float = 0.0
    waiting_seconds: float = 0.0


class RequestTimings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that one worker spent on a request, on its own monotonic clock.

    queue: arrival in the engine → first scheduled. prefill: first scheduled → last prompt token computed. held: the order's
    arrival in the worker → its first tokens are sent; the worker's own handling is what is left of it.
    """

    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer: TransferReport = TransferReport()
    held_seconds: float = 0.0


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """New tokens of one choice in one step. The last output of a request carries ``finish_reason``.

    is_leg_finished: this is the engine's last output for the request. The last output of a prefill leg whose answer
    continues elsewhere has no ``finish_reason``. handed_over: the leg was handed off (``contract.requests.HandOff``): it
    has emitted the tokens before ``first_index``, and the KV of all but the last of them is lent. first_index: index of
    ``token_ids[0]`` in the answer. stop_reason: the stop token id that ended it (None for the model's own end token).
    num_cached_tokens: prompt tokens whose KV this engine did not compute (set on the first output). pooled: the embedding
    as float32 numbers, with ``finish_reason`` STOP. An error has ``finish_reason`` ERROR, ``error_kind`` and
    ``error_message``; error_param: the field at fault. is_rejected: a worker has not accepted the request.
    """

    request_id: str
    attempt: int = 0
    choice: int = 0
    first_index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    is_leg_finished: bool = False
    handed_over: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    timings: RequestTimings | None = None
    pooled: list[float] | None = None
    error_kind: str | None = None
    error_message: str | None = None
    error_param: str | None = None
    is_rejected: bool = False

    @classmethod
    def of_error(
        cls, request: EngineRequest, kind: str, message: str, param: str | None = None
    ) -> "EngineOutput":
        """Return the only output of a request that fails before it emits a token."""
        return cls(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=request.choice,
            first_index=request.first_index,
            is_leg_finished=True,
            finish_reason=FinishReason.ERROR,
            error_kind=kind,
            error_message=message,
            error_param=param,
        )

    @property
    def end(self) -> tuple[FinishReason, int | str | None]:
        """The finish reason and the stop reason for clients: an answer that its grammar cuts off has ``length``."""
        if self.finish_reason is FinishReason.GRAMMAR:
            return FinishReason.LENGTH, self.finish_reason.value
        return self.finish_reason or FinishReason.STOP, self.stop_reason

    @property
    def key(self) -> str:
        """The ``EngineRequest.key`` of the request."""
        return choice_key(self.request_id, self.choice, self.attempt)
