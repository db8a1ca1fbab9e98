"""Which workers take a request: pure functions over a snapshot.

The rule: a prefill and a decode worker where both exist, else a worker that is both. Of the candidates the least
loaded one; equally loaded ones take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from contract.errors import UnavailableError
from contract.identity import Role


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """What a policy sees of a worker. num_outstanding_tokens: of this router's requests; the rest it reports itself."""

    worker_id: str
    role: Role
    num_outstanding_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


@dataclass(frozen=True)
class Placement:
    """Worker ids of the two legs. ``prefill`` is None where the decode worker computes the prompt itself."""

    prefill: str | None
    decode: str


def place(workers: Sequence[WorkerView], turn: int) -> Placement:
    """Pick the workers of one request. ``turn`` counts requests, for ties. Raises UnavailableError."""
    prefill = _least_loaded(workers, Role.PREFILL, turn)
    decode = _least_loaded(workers, Role.DECODE, turn)
    if prefill and decode:
        return Placement(prefill.worker_id, decode.worker_id)
    both = _least_loaded(workers, Role.BOTH, turn)
    if both:
        return Placement(None, both.worker_id)
    raise UnavailableError(f"no worker is ready: {can_serve(workers)}; try again later")


def can_serve(workers: Sequence[WorkerView]) -> str | None:
    """None when a request can be placed, else what is missing."""
    roles = {worker.role for worker in workers}
    if Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles:
        return None
    missing = [role.value for role in (Role.PREFILL, Role.DECODE) if role not in roles]
    return f"no {' and no '.join(missing)} worker has registered"


def _least_loaded(workers: Sequence[WorkerView], role: Role, turn: int) -> WorkerView | None:
    candidates = [worker for worker in workers if worker.role == role]
    if not candidates:
        return None
    least = min(map(_load, candidates))
    equals = [worker for worker in candidates if _load(worker) == least]
    return equals[turn % len(equals)]


def _load(worker: WorkerView) -> tuple[int, int, float]:
    return (
        worker.num_outstanding_tokens,
        worker.num_waiting + worker.num_running,
        round(worker.kv_cache_usage, 2),
    )
