"""Which workers take a request, and when they have room for it: pure functions over a snapshot.

The rule: a prefill and a decode worker that can reach each other, or one that is both if that one has less to do. Of the
candidates the least loaded one; equally loaded ones take turns. A worker has room as long as its credit reaches: it
reports itself how many legs and tokens it takes on at once. A request is never placed where it does not fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from contract.identity import Role
from router.legs import AGGREGATED, DECODE, EMBED, PREFILL, Placement, placed

_FULL = 0.95
"""Used share of a KV pool from which on it gets no new request: what runs there still grows."""
UNLIMITED = 2**62
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """What a policy sees of a worker.

    num_requests, num_tokens: legs of this router that are bound to it. max_requests, max_tokens: its credit. max_length:
    tokens that a request may have there, answer included. pool_tokens: tokens that its KV pool holds. The rest it reports
    itself.
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
    max_length: int = UNLIMITED
    pool_tokens: int = UNLIMITED


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

Pairs = frozenset[tuple[str, str]]
"""Worker ids, prefill first."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a request asks of its workers.

    num_prompt_tokens: with the tokens that were delivered already. num_delivered: how many those are. num_answer_tokens:
    kept free beside them on the decode side. num_choices: answers to the prompt that begin together. max_length: tokens
    that prompt and answer have together at the most; with may_be_cut a worker that ends the answer earlier will do where no
    other is attached for a while. prefer: the prefill worker whose prefix cache holds the prompt. avoid: workers where an
    earlier attempt failed; they are asked only for what no other worker does, even if it has no room just now. too_small:
    workers that refused the request for its length. is_replay: an earlier attempt was begun, so where no prefill worker is
    left the decode worker computes the prompt itself. is_local: it shall, because handing KV over has failed again and
    again. is_embedding: nothing is decoded.
    """

    num_prompt_tokens: int
    num_answer_tokens: int
    num_delivered: int = 0
    num_choices: int = 1
    max_length: int = 0
    may_be_cut: bool = False
    prefer: str | None = None
    avoid: frozenset[str] = frozenset()
    too_small: frozenset[str] = frozenset()
    is_replay: bool = False
    is_local: bool = False
    is_embedding: bool = False

    @property
    def end_roles(self) -> tuple[Role, ...]:
        """Roles of the workers on which it can end."""
        return (Role.PREFILL if self.is_embedding else Role.DECODE), Role.AGGREGATED

    @property
    def least_length(self) -> int:
        """Tokens of prompt and answer that a worker on which it ends must take."""
        if self.is_embedding:
            return self.num_prompt_tokens
        return max(self.num_prompt_tokens + 1, self.max_length)

    @property
    def need(self) -> Need:
        """Without what it cannot be placed."""
        if self.is_embedding:
            return Need.EMBEDDING
        return Need.REPLAY if self.is_replay else Need.ANSWER


def place(
    workers: Sequence[WorkerView], wish: Wish, turn: int, severed: Pairs = frozenset()
) -> Placement | None:
    """Pick the workers of one request; None while none has room. ``turn`` counts requests, for ties.

    severed: pairs that cannot reach each other now. A decode worker that no prefill worker reaches computes prompts itself.
    """
    able = [worker for worker in workers if fits(worker, wish)]
    is_local = _computes_locally(workers, able, wish)
    workers = _trusted(able, wish)
    both = _first(_by_load(workers, Role.AGGREGATED, wish, turn))
    if wish.is_embedding:
        pooling = _first(_by_load(workers, Role.PREFILL, wish, turn)) or both
        return placed((EMBED, pooling.worker_id)) if pooling else None
    decodes = _by_load(workers, Role.DECODE, wish, turn)
    if is_local:
        return _alone(_first(decodes), both, wish)
    prefills = _by_load(workers, Role.PREFILL, wish, turn)
    pair = _first((p, d) for d in decodes for p in prefills if (p.worker_id, d.worker_id) not in severed)
    if pair:
        prefill, decode = pair
        if both is None or both.num_tokens >= max(prefill.num_tokens, decode.num_tokens):
            legs = (PREFILL, prefill.worker_id), (DECODE, decode.worker_id)
            return placed(*legs, num_delivered=wish.num_delivered)
    if both:
        return _alone(None, both, wish)
    return _alone(_first(_unreached(workers, decodes, wish, severed)), None, wish)


def fits(worker: WorkerView, wish: Wish) -> bool:
    """Whether the worker is able to take the request at all, whatever it has to do now."""
    if not worker.max_requests or worker.worker_id in wish.too_small:
        return False
    most = wish.least_length
    if wish.is_embedding:
        return most <= min(worker.max_length, worker.pool_tokens)
    if wish.num_prompt_tokens + (worker.role is not Role.PREFILL) > worker.pool_tokens:
        return False
    if (
        worker.role is Role.PREFILL
    ):  # of the answer it draws token 0 only, which must not be the last for want of space
        return min(wish.num_prompt_tokens + 2, most) <= worker.max_length
    return most <= worker.max_length


def candidates(workers: Iterable[WorkerView], wish: Wish) -> frozenset[str]:
    """Return the ids of the workers that may take a leg of the request; empty where it fits none that could decode it."""
    able = [worker for worker in workers if fits(worker, wish)]
    if not any(worker.role in wish.end_roles for worker in able):
        return frozenset()
    return frozenset(
        worker.worker_id for worker in able if worker.role is not Role.DECODE or not wish.is_embedding
    )


def awaited(workers: Sequence[WorkerView], wish: Wish) -> frozenset[str]:
    """Return the ids of the workers that a request without a place waits for: nobody behind it may take their room.

    Those that decode, always; those that compute prompts only if none of them has room for it.
    """
    able = [worker for worker in workers if fits(worker, wish)]
    prefills = [worker for worker in able if worker.role is Role.PREFILL]
    others = [worker for worker in able if worker.role is not Role.PREFILL]
    if wish.is_embedding:
        others = [worker for worker in others if worker.role is Role.AGGREGATED]
    elif any(_has_room(worker, wish) for worker in prefills):
        prefills = []
    return frozenset(worker.worker_id for worker in (*prefills, *others))


def why_too_long(workers: Iterable[WorkerView], wish: Wish) -> str:
    """Describe why none of the workers is able to take the request."""
    most = longest(worker for worker in workers if worker.max_requests)
    return f"no attached worker takes {wish.least_length} tokens of prompt and answer together; the limit is {most or 0} now"


def longest(workers: Iterable[WorkerView]) -> int | None:
    """Return how many tokens prompt and answer may have for some pair of workers, or one that is both; None without any."""
    most: dict[Role, int] = {}
    for worker in workers:
        most[worker.role] = max(most.get(worker.role, 0), worker.max_length)
    pair = [most[role] for role in (Role.PREFILL, Role.DECODE) if role in most]
    options = [*([min(pair)] if pair else []), *([most[Role.AGGREGATED]] if Role.AGGREGATED in most else [])]
    return max(options, default=None)


def is_full(kv_cache_usage: float) -> bool:
    """A KV cache that takes in no further request."""
    return kv_cache_usage >= _FULL


def missing_role(workers: Sequence[WorkerView], need: Need = Need.ANSWER) -> str | None:
    """None when a request can be placed sooner or later, else what is missing."""
    roles = {worker.role for worker in workers if worker.max_requests}
    needed = _NEEDED[need]
    if Role.AGGREGATED in roles or roles.issuperset(needed):
        return None
    wanted = needed if need is Need.EMBEDDING else _NEEDED[Need.ANSWER]
    missing = [role.value for role in wanted if role not in roles]
    return f"no {' and no '.join(missing)} worker is attached"


def _trusted(workers: Sequence[WorkerView], wish: Wish) -> Sequence[WorkerView]:
    """Those that are not avoided, where they suffice without the others; else all."""
    trusted = [worker for worker in workers if worker.worker_id not in wish.avoid]
    return workers if missing_role(trusted, Need.EMBEDDING if wish.is_embedding else Need.ANSWER) else trusted


def _computes_locally(workers: Sequence[WorkerView], able: Sequence[WorkerView], wish: Wish) -> bool:
    """Whether the prompt is computed where it is decoded: no prefill worker is able to, for its length or at all.

    New requests wait for a prefill worker where none is attached: one may be starting again.
    """
    is_prefill = [worker.role is Role.PREFILL for worker in able]
    is_attached = any(worker.role is Role.PREFILL and worker.max_requests for worker in workers)
    return wish.is_local or (not any(is_prefill) and (wish.is_replay or is_attached))


def _alone(decode: WorkerView | None, both: WorkerView | None, wish: Wish) -> Placement | None:
    """Place the whole request on one worker."""
    worker = min(filter(None, (decode, both)), key=lambda each: _load(each, wish), default=None)
    return placed((AGGREGATED, worker.worker_id), num_delivered=wish.num_delivered) if worker else None


def _unreached(
    workers: Sequence[WorkerView], decodes: Iterable[WorkerView], wish: Wish, severed: Pairs
) -> Iterable[WorkerView]:
    """Return those of ``decodes`` that none of the prefill workers which may be chosen can reach."""
    prefills = _of_role(workers, Role.PREFILL, wish)
    if not prefills:
        return []
    return [d for d in decodes if all((p.worker_id, d.worker_id) in severed for p in prefills)]


def _of_role(workers: Sequence[WorkerView], role: Role, wish: Wish) -> list[WorkerView]:
    able = [worker for worker in workers if worker.role is role]
    return [worker for worker in able if worker.worker_id not in wish.avoid] or able


def _by_load(workers: Sequence[WorkerView], role: Role, wish: Wish, turn: int) -> list[WorkerView]:
    """Return the workers of a role that have room, the least loaded first, equals beginning with another one each turn."""
    having_room = [worker for worker in _of_role(workers, role, wish) if _has_room(worker, wish)]
    ranked = sorted(having_room, key=lambda worker: _load(worker, wish))
    num_equals = sum(_load(worker, wish) == _load(ranked[0], wish) for worker in ranked)
    start = turn % num_equals if num_equals else 0
    return [*ranked[start:num_equals], *ranked[:start], *ranked[num_equals:]]


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


def _first(items: Iterable[_T]) -> _T | None:
    return next(iter(items), None)
