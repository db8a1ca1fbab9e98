"""Which workers take a request, and when they have room for it: pure functions over a snapshot.

The rule: a prefill and a decode worker, or one that is both if that one has less to do. Of the candidates the least
loaded one; equally loaded ones take turns. A worker has room as long as its credit reaches: it says itself how many legs
and tokens it takes on at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from contract.identity import Role

_FULL = 0.95
"""Used share of a KV pool from which on it gets no new request: what runs there still grows."""


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """What a policy sees of a worker.

    num_requests, num_tokens: legs of this router that are bound to it. max_requests, max_tokens: its credit. The rest it
    reports itself.
    """

    worker_id: str
    role: Role
    num_requests: int = 0
    num_tokens: int = 0
    max_requests: int = 0
    max_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


class Need(Enum):
    """What must be attached for a request to be placed at all.

    ANSWER: a prefill and a decode worker, or one that is both. REPLAY: a decode worker will do. EMBEDDING: a prefill worker,
    or one that is both; who lacks this lacks ANSWER too.
    """

    ANSWER = auto()
    REPLAY = auto()
    EMBEDDING = auto()


_NEEDED: dict[Need, tuple[Role, ...]] = {
    Need.ANSWER: (Role.PREFILL, Role.DECODE),
    Need.REPLAY: (Role.DECODE,),
    Need.EMBEDDING: (Role.PREFILL,),
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request asks of its workers.

    num_prompt_tokens: with the tokens that were delivered already. num_answer_tokens: kept free beside them on the decode
    side. prefer: the prefill worker whose prefix cache holds the prompt. avoid: workers where an earlier attempt failed;
    they are asked only for what no other worker does, even if it has no room just now.
    is_replay: an earlier attempt was begun, so where no prefill worker is left the decode worker computes the prompt
    itself. is_local: it shall, because handing KV over has failed again and again. is_embedding: nothing is decoded.
    """

    num_prompt_tokens: int
    num_answer_tokens: int
    prefer: str | None = None
    avoid: frozenset[str] = frozenset()
    is_replay: bool = False
    is_local: bool = False
    is_embedding: bool = False

    @property
    def need(self) -> Need:
        """Without what it cannot be placed."""
        if self.is_embedding:
            return Need.EMBEDDING
        return Need.REPLAY if self.is_replay else Need.ANSWER


@dataclass(frozen=True)
class Placement:
    """Worker ids of the two legs. ``prefill`` is None where ``decode`` computes the prompt itself, or nothing but it."""

    prefill: str | None
    decode: str


def place(workers: Sequence[WorkerView], wish: Wish, turn: int) -> Placement | None:
    """Pick the workers of one request; None while none has room. ``turn`` counts requests, for ties."""
    workers = _trusted(workers, wish)
    both = _best(workers, Role.BOTH, wish, turn)
    if wish.is_embedding:
        pooling = _best(workers, Role.PREFILL, wish, turn) or both
        return Placement(None, pooling.worker_id) if pooling else None
    decode = _best(workers, Role.DECODE, wish, turn)
    if _computes_locally(workers, wish):
        alone = min(filter(None, (decode, both)), key=lambda worker: _load(worker, wish), default=None)
        return Placement(None, alone.worker_id) if alone else None
    prefill = _best(workers, Role.PREFILL, wish, turn)
    if prefill and decode:
        busier = max(prefill.num_tokens, decode.num_tokens)
        if both is None or both.num_tokens >= busier:
            return Placement(prefill.worker_id, decode.worker_id)
    return Placement(None, both.worker_id) if both else None


def is_full(kv_cache_usage: float) -> bool:
    """A KV cache that takes in no further request."""
    return kv_cache_usage >= _FULL


def missing_role(workers: Sequence[WorkerView], need: Need = Need.ANSWER) -> str | None:
    """None when a request can be placed sooner or later, else what is missing."""
    roles = {worker.role for worker in workers if worker.max_requests}
    needed = _NEEDED[need]
    if Role.BOTH in roles or roles.issuperset(needed):
        return None
    wanted = needed if need is Need.EMBEDDING else _NEEDED[Need.ANSWER]
    missing = [role.value for role in wanted if role not in roles]
    return f"no {' and no '.join(missing)} worker is attached"


def _trusted(workers: Sequence[WorkerView], wish: Wish) -> Sequence[WorkerView]:
    """Those that are not avoided, where they suffice without the others; else all."""
    trusted = [worker for worker in workers if worker.worker_id not in wish.avoid]
    return workers if missing_role(trusted, Need.EMBEDDING if wish.is_embedding else Need.ANSWER) else trusted


def _computes_locally(workers: Sequence[WorkerView], wish: Wish) -> bool:
    has_prefill = any(worker.role is Role.PREFILL and worker.max_requests for worker in workers)
    return wish.is_local or (wish.is_replay and not has_prefill)


def _best(workers: Sequence[WorkerView], role: Role, wish: Wish, turn: int) -> WorkerView | None:
    able = [worker for worker in workers if worker.role is role and worker.max_requests]
    trusted = [worker for worker in able if worker.worker_id not in wish.avoid]
    candidates = [worker for worker in trusted or able if _has_room(worker, wish)]
    if not candidates:
        return None
    least = min(_load(worker, wish) for worker in candidates)
    equals = [worker for worker in candidates if _load(worker, wish) == least]
    return equals[turn % len(equals)]


def _has_room(worker: WorkerView, wish: Wish) -> bool:
    """A prefill worker while its queue is below its limit; the others if the whole request fits; all if they are idle."""
    if worker.num_requests >= worker.max_requests:
        return False
    if worker.num_requests == 0:
        return True
    if worker.role is Role.PREFILL:
        return worker.num_tokens < worker.max_tokens
    needed = worker.num_tokens + wish.num_prompt_tokens + wish.num_answer_tokens
    return needed <= worker.max_tokens and not is_full(worker.kv_cache_usage)


def _load(worker: WorkerView, wish: Wish) -> tuple[bool, bool, int, int, float]:
    return (
        worker.worker_id in wish.avoid,
        worker.role is Role.PREFILL and worker.worker_id != wish.prefer,
        worker.num_tokens,
        worker.num_waiting + worker.num_running,
        round(worker.kv_cache_usage, 2),
    )
