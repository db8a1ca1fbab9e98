"""The five parts of a request's latency, which sum to the whole by construction."""

from typing import Any

import msgspec
from msgspec import structs

from contract.outputs import TransferReport


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, bytes and copies of one request.

    queue: what is left of arrival → first token without ``prefill``. It is the sum of five: intake (checks and tokenizing),
    placement (the wait for workers with room, and attempts that failed before the first token), worker (its
    handling of the order and of the first token, between its port and its engine), engine_queue (the wait in the engine for
    its first step) and messages (the rest: the order's way to the worker, and the first token's way back).
    transfer: the exposed part (last range published → verified), which is the only part of the transfer in the sum.
    """

    intake: float
    placement: float
    worker: float
    engine_queue: float
    messages: float
    prefill: float
    transfer: float
    first_decode_step: float
    decode: float
    transfer_hidden: float
    transfer_bytes: int
    transfer_pieces: int
    transfer_copying: float

    @property
    def queue(self) -> float:
        """Arrival → first token, less ``prefill``."""
        return self.intake + self.placement + self.worker + self.engine_queue + self.messages

    @property
    def end_to_end(self) -> float:
        """Arrival → last token: the sum of the five parts."""
        return self.queue + self.prefill + self.transfer + self.first_decode_step + self.decode

    def as_dict(self) -> dict[str, Any]:
        """Return the values by the names of the gRPC message ``Timings``."""
        return {"queue": self.queue, **structs.asdict(self), "end_to_end": self.end_to_end}


class Stopwatch:
    """The times of one request on the router's clock, and the seconds that its workers report.

    A worker measures with another clock. Its seconds are therefore cut to the interval of the router's clock around them.
    """

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.queued_at: float | None = None
        self.bound_at: float | None = None
        self.token_0: float | None = None
        self.token_1: float | None = None
        self.held_seconds = 0.0
        self.engine_queue_seconds = 0.0
        self.prefill_seconds = 0.0
        self.transfer = TransferReport()

    def on_queued(self, now: float) -> None:
        """Record that the request waits for workers. Only the first time counts."""
        if self.queued_at is None:
            self.queued_at = now

    def on_bound(self, now: float) -> None:
        """Record that its workers are chosen. The last time before the first token counts."""
        if self.token_0 is None:
            self.bound_at = now

    def on_tokens(self, first_index: int, count: int, now: float) -> None:
        """Record that ``count`` tokens from ``first_index`` on have just arrived."""
        if self.token_0 is None and count and first_index == 0:
            self.token_0 = now
        if self.token_1 is None and first_index <= 1 < first_index + count:
            self.token_1 = now

    def split(self, finish: float) -> Timings:
        """Return the parts for an answer that ended at ``finish``. An answer of one token has no transfer or decode step."""
        token_0 = finish if self.token_0 is None else self.token_0
        queued = self.arrival if self.queued_at is None else self.queued_at
        bound = queued if self.bound_at is None else self.bound_at
        from_bound = token_0 - bound
        # each is cut to what is left of the interval, so that the parts sum to the whole whatever a worker reports
        prefill = min(max(self.prefill_seconds, 0.0), from_bound)
        engine_queue = min(max(self.engine_queue_seconds, 0.0), from_bound - prefill)
        between = from_bound - prefill - engine_queue
        worker = min(max(self.held_seconds - prefill - engine_queue, 0.0), between)
        transfer = first_step = 0.0
        last = token_0
        if self.token_1 is not None:
            gap = self.token_1 - token_0
            transfer = min(max(self.transfer.exposed_seconds, 0.0), gap)
            first_step = gap - transfer
            last = self.token_1
        return Timings(
            intake=queued - self.arrival,
            placement=bound - queued,
            worker=worker,
            engine_queue=engine_queue,
            messages=between - worker,
            prefill=prefill,
            transfer=transfer,
            first_decode_step=first_step,
            decode=finish - last,
            transfer_hidden=self.transfer.hidden_seconds,
            transfer_bytes=self.transfer.num_bytes,
            transfer_pieces=self.transfer.num_pieces,
            transfer_copying=self.transfer.copying_seconds,
        )
