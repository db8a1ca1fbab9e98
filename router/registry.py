"""The workers that are attached now, and which requests are bound to them."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from contract.errors import IncompatiblePeerError, InvalidRequestError, WorkerLostError
from contract.identity import Role
from contract.layout import KVLayout, weights_of
from contract.membership import Credit, Load, Registration
from protos import PROTOCOL_MAX, PROTOCOL_MIN
from protos import worker_pb2 as pb
from router.changes import ChangeSignal
from router.inbox import Event
from router.policy import UNLIMITED, Need, WorkerView, is_full, longest, missing_role
from router.resting import MAX_REST_SECONDS, Rest
from router.running_shares import Held, Use
from router.worker_calls import WorkerCalls
from wire.membership import load_from_proto

logger = logging.getLogger(__name__)

LegKey = tuple[str, int, int]
"""(request id, attempt, choice)"""


_MAX_CANCELS = 4
"""To one worker at a time. A client that hangs up ends hundreds of answers at once; others' starts would wait for those."""


class AttachedWorker:
    """One incarnation of a worker, from its registration until its stream closes.

    Owns the legs that are bound to it, by what they are for: where its entries go. ``gone`` is set when it is
    detached; from then on it says nothing any more, even if it is still alive. session: names this incarnation's stream, so
    that a late call meant for it starts nothing on the next one. is_leaving: one side has said goodbye.
    held: what runs here, by client. on_change: called when it may have room that it had not.
    """

    def __init__(self, registration: Registration, calls: WorkerCalls, on_change: Callable[[], None]) -> None:
        self.registration = registration
        self.name = registration.worker_id
        self.calls = calls
        self.session = secrets.token_hex(8)
        self.load = Load()
        self.credit = Credit()
        self.gone = asyncio.Event()
        self.is_leaving = False
        self.num_tokens = 0
        self.num_stale_entries = 0
        self._on_change = on_change
        self.held = Held()
        self._legs: dict[LegKey, tuple[Callable[[Event], None], int, str]] = {}
        self._cancels = asyncio.Semaphore(_MAX_CANCELS)

    @property
    def role(self) -> Role:
        """What it is for."""
        return Role(self.registration.role)

    @property
    def _pool_tokens(self) -> int:
        """Tokens that its KV pool holds; block 0 is the null block."""
        num_blocks = self.registration.num_blocks
        layout = self.registration.kv_layout
        if not num_blocks:
            return UNLIMITED
        return (num_blocks - 1) * (layout.block_size if layout else 0)

    def bind(self, key: LegKey, post: Callable[[Event], None], num_tokens: int, tenant: str = "") -> None:
        """Send this leg's entries to ``post``, and its end if the worker dies. ``num_tokens`` count as load.

        tenant: the client for which the leg runs.
        """
        self._legs[key] = post, num_tokens, tenant
        self.num_tokens += num_tokens
        self.held.add(tenant, 1, num_tokens)

    def unbind(self, key: LegKey) -> None:
        """Forget a leg; what still comes for it is dropped."""
        if leg := self._legs.pop(key, None):
            _, num_tokens, tenant = leg
            self.num_tokens -= num_tokens
            self.held.add(tenant, -1, -num_tokens)
            self._on_change()

    async def cancel(self, key: LegKey) -> None:
        """Stop a leg there, after those that are being stopped, unless the worker is gone by then. Raises KvbatonError."""
        async with self._cancels:
            if self.gone.is_set():
                return
            rest = Rest(MAX_REST_SECONDS)
            await self.calls.cancel(*key)
            await rest.after_work()

    def deliver(self, step: pb.StepOutput) -> None:
        """Hand the entries of one step to their legs; those of older attempts and unknown requests are dropped."""
        for entry in step.entries:
            leg = self._legs.get((entry.request_id, entry.attempt, entry.choice))
            if leg and not self.gone.is_set():
                leg[0](entry)
            else:
                self.num_stale_entries += 1
        if step.HasField("load"):
            self.report_load(load_from_proto(step.load))

    def report_load(self, load: Load) -> None:
        """It has told how busy it is. That matters to those who wait when its KV cache was full and is no more."""
        was_full = is_full(self.load.kv_cache_usage)
        self.load = load
        if was_full and not is_full(load.kv_cache_usage):
            self._on_change()

    def grant(self, credit: Credit) -> None:
        """It has told how much it takes on."""
        self.credit = credit
        self._on_change()

    def lose(self, reason: str) -> None:
        """The worker is dead: every leg bound to it ends with WorkerLostError."""
        self.gone.set()
        for post, _, _ in list(self._legs.values()):
            post(WorkerLostError(f"worker {self.name} was lost with the request: {reason}"))

    def view(self) -> WorkerView:
        """What a policy sees."""
        return WorkerView(
            worker_id=self.name,
            role=self.role,
            num_requests=len(self._legs),
            num_tokens=self.num_tokens,
            max_requests=0 if self.is_leaving else self.credit.max_requests,
            max_tokens=self.credit.max_tokens,
            num_running=self.load.num_running,
            num_waiting=self.load.num_waiting,
            kv_cache_usage=self.load.kv_cache_usage,
            max_length=self.registration.max_model_len,
            pool_tokens=self._pool_tokens,
        )

    def debug_state(self) -> dict[str, Any]:
        """Plain data for ``/debug/state``."""
        reg = self.registration
        return {
            "worker_id": reg.worker_id,
            "boot_id": reg.boot_id,
            "role": reg.role,
            "pid": reg.pid,
            "address": reg.address,
            "control_address": reg.control_address,
            "admin_address": reg.admin_address,
            "num_running": self.load.num_running,
            "num_waiting": self.load.num_waiting,
            "kv_cache_usage": self.load.kv_cache_usage,
            "max_requests": self.credit.max_requests,
            "max_tokens": self.credit.max_tokens,
            "num_legs": len(self._legs),
            "num_leg_tokens": self.num_tokens,
            "num_stale_entries": self.num_stale_entries,
        }


class WorkerIdTakenError(IncompatiblePeerError):
    """Another process with the same worker id is attached and alive."""


class Registry:
    """Owns the set of attached workers, one incarnation per worker id.

    ``changes`` is told when a worker comes or goes, or may have room that it had not. The first worker decides which
    model this router serves, for the router's whole life. memory_seconds: how long the size of a worker that has gone is
    remembered: it may be starting again.
    """

    def __init__(
        self,
        changes: ChangeSignal,
        memory_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers: dict[str, AttachedWorker] = {}
        self._gone: dict[str, tuple[float, WorkerView]] = {}
        self._memory_seconds = memory_seconds
        self._clock = clock
        self._model_fingerprint: str | None = None
        self._embeds_only = False
        self._changes = changes

    @property
    def workers(self) -> list[AttachedWorker]:
        """The attached workers, oldest first."""
        return list(self._workers.values())

    def snapshot(self) -> list[WorkerView]:
        """What a policy decides on."""
        return [worker.view() for worker in self._workers.values()]

    def decoding(self) -> list[Use]:
        """Return what each worker that decodes takes on, and who holds how much of it."""
        return [
            Use(worker.credit.max_requests, worker.credit.max_tokens, worker.held)
            for worker in self._workers.values()
            if worker.role is not Role.PREFILL
        ]

    def get(self, worker_id: str) -> AttachedWorker:
        """The current incarnation of a worker of the last snapshot (no await lies between)."""
        return self._workers[worker_id]

    def missing(self) -> str | None:
        """None when a request can be placed sooner or later, else what is missing."""
        return missing_role(self.snapshot(), Need.EMBEDDING if self._embeds_only else Need.ANSWER)

    @property
    def embeds_only(self) -> bool:
        """The model has no output head: it gives embeddings and no answers."""
        return self._embeds_only

    def max_model_len(self, otherwise: int) -> int:
        """Tokens that a request may have on the largest of the attached workers (of a pair: on both)."""
        return longest(worker.view() for worker in self._workers.values()) or otherwise

    def recent_max_model_len(self, otherwise: int) -> int:
        """The same with the workers that have gone a moment ago."""
        now = self._clock()
        self._gone = {name: gone for name, gone in self._gone.items() if gone[0] > now}
        return longest([*self.snapshot(), *(view for _, view in self._gone.values())]) or otherwise

    def meet(self, registration: Registration, calls: WorkerCalls) -> AttachedWorker:
        """A worker that wants to attach."""
        return AttachedWorker(registration, calls, self._changes.tell)

    def holder(self, registration: Registration) -> AttachedWorker | None:
        """Return the attached worker that has this worker id and is another process; None where there is none."""
        worker = self._workers.get(registration.worker_id)
        return worker if worker and worker.registration.boot_id != registration.boot_id else None

    def attach(self, worker: AttachedWorker) -> None:
        """Take in a worker; an older stream of the same process is lost.

        Raises InvalidRequestError for an incomplete registration, IncompatiblePeerError for one that does not fit,
        WorkerIdTakenError where another process has its id.
        """
        new = worker.registration
        self._check(new)
        if other := self.holder(new):
            old = other.registration
            raise WorkerIdTakenError(
                f"worker {new.worker_id} (boot id {new.boot_id}, {new.address}) is refused: another process with this "
                f"worker id is attached (boot id {old.boot_id}, pid {old.pid}, {old.address}); give each worker an id of "
                "its own, or stop the other one"
            )
        if former := self._workers.pop(new.worker_id, None):
            former.lose(f"it registered again with boot id {new.boot_id}")
        self._model_fingerprint = new.model_fingerprint
        self._embeds_only = new.embeds_only
        self._workers[new.worker_id] = worker
        self._gone.pop(new.worker_id, None)
        logger.info("worker %s (%s, boot id %s) attached", worker.name, new.role, new.boot_id)
        self._changes.tell()

    def detach(self, worker: AttachedWorker, reason: str) -> None:
        """The worker's stream has closed; does nothing for an incarnation that was replaced."""
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
            self._gone[worker.name] = self._clock() + self._memory_seconds, worker.view()
            if worker.is_leaving:
                logger.info("worker %s has left", worker.name)
            else:
                logger.warning("worker %s is lost: %s", worker.name, reason)
            worker.lose(reason)
            self._changes.tell()

    def dismiss_all(self) -> None:
        """This router stops: every worker's stream ends with a goodbye."""
        for worker in self._workers.values():
            worker.is_leaving = True
            worker.gone.set()

    def _check(self, new: Registration) -> None:
        layout = _check_complete(new)
        if new.protocol_min > PROTOCOL_MAX or new.protocol_max < PROTOCOL_MIN:
            raise IncompatiblePeerError(
                f"worker {new.worker_id} speaks protocol {new.protocol_min}..{new.protocol_max}, "
                f"this router {PROTOCOL_MIN}..{PROTOCOL_MAX}"
            )
        if self._model_fingerprint and weights_of(self._model_fingerprint) != weights_of(
            new.model_fingerprint
        ):
            raise IncompatiblePeerError(
                f"worker {new.worker_id} has the model {new.model_name} with fingerprint "
                f"{new.model_fingerprint}, this router serves {self._model_fingerprint}"
            )
        for other in self._workers.values():
            theirs = other.registration.kv_layout
            differences = layout.differences(theirs) if theirs else []
            if differences and other.name != new.worker_id:
                raise IncompatiblePeerError(
                    f"no KV can be handed over between worker {new.worker_id} (ours) and worker {other.name} "
                    f"(the peer): {'; '.join(differences)}"
                )


def _check_complete(new: Registration) -> KVLayout:
    """Return the layout of a registration that lacks nothing. Raises InvalidRequestError that names what is missing."""
    names = ["worker_id", "boot_id", "address", "model_fingerprint", "max_model_len"]
    roles = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)
    if new.role not in roles:
        raise InvalidRequestError(f"role is {new.role!r}; choose one of {', '.join(roles)}", param="role")
    if new.role == Role.PREFILL:
        names.append("control_address")
    for name in names:
        if not getattr(new, name):
            raise InvalidRequestError(f"the registration of {new.worker_id!r} lacks {name}", param=name)
    if new.kv_layout is None:
        raise InvalidRequestError(f"the registration of {new.worker_id!r} lacks kv_layout", param="kv_layout")
    return new.kv_layout
