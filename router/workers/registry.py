"""The workers that are attached now, the weights they serve, and what a router remembers of detached ones."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec import structs

from contract.errors import IncompatiblePeerError, InvalidRequestError
from contract.identity import WORKER_ROLES, Role, worker_role
from contract.layout import weights_of
from contract.membership import LoadedWeights, Registration
from protos import WORKER_PROTOCOL_MAX, WORKER_PROTOCOL_MIN
from router.concurrency import ChangeSignal
from router.routing.legs import EMBEDDING, GENERATION
from router.routing.policy import is_role_needed, missing_role, missing_roles
from router.routing.running_shares import Held, TotalCredit
from router.routing.views import WorkerSize, WorkerViews, longest
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.worker_calls import WorkerCalls

_MAX_NAMES = 8192
"""The names of workers whose restarts are remembered. Kubernetes gives every pod a name of its own."""
logger = logging.getLogger(__name__)


class WorkerIdTakenError(IncompatiblePeerError):
    """Another process with the same worker id is attached and alive."""


def group_of(workers: Iterable[AttachedWorker], worker: AttachedWorker) -> list[AttachedWorker]:
    """Return the workers of a worker's data-parallel group, which is the worker alone if it has none."""
    name = worker.registration.group
    return [other for other in workers if other.registration.group == name] if name else [worker]


class ServedWeights:
    """Owns the fingerprint of a router's weights: those of its first worker, until workers report a later reload.

    KV and tokens of different weights must never meet (law 7). So a worker with other weights is refused when it attaches,
    and detached as soon as it offers credit. While its weights are reloaded it offers none, so that it may report them later
    than others do. epoch: the number of the reload; a greater one counts for all workers.
    """

    def __init__(self) -> None:
        self.fingerprint: str | None = None
        self.epoch = 0

    def fits(self, fingerprint: str) -> bool:
        """Return whether these weights are served; their dtype does not matter."""
        return self.fingerprint is None or weights_of(fingerprint) == weights_of(self.fingerprint)

    def accepts(self, loaded: LoadedWeights) -> bool:
        """Return whether a worker with these weights may attach."""
        return self.fits(loaded.model_fingerprint) or loaded.epoch > self.epoch

    def adopt(self, loaded: LoadedWeights) -> None:
        """Serve the weights that a worker has, if no others are served, or if their reload is a later one."""
        if self.accepts(loaded):
            self.fingerprint = loaded.model_fingerprint
            self.epoch = max(self.epoch, loaded.epoch)

    def on_loaded(
        self, worker: AttachedWorker, loaded: LoadedWeights, workers: Iterable[AttachedWorker]
    ) -> None:
        """Record the weights that a worker has loaded, and what follows for it and the others."""
        epoch = loaded.epoch
        worker.registration = structs.replace(
            worker.registration, model_fingerprint=loaded.model_fingerprint, weights_epoch=epoch
        )
        self.adopt(loaded)
        for each in workers:
            self.check(each)

    def check(self, worker: AttachedWorker) -> None:
        """Detach a worker that offers credit with other weights. Call it when one of these has changed."""
        fingerprint = worker.registration.model_fingerprint
        if worker.capacity.credit.max_requests and not self.fits(fingerprint):
            logger.warning(
                "worker %s is detached: it has weights with fingerprint %s, this router serves %s",
                worker.name,
                fingerprint,
                self.fingerprint,
            )
            worker.leave()
            worker.gone.set()


class Registry:
    """Owns the set of attached workers, one incarnation per worker id.

    memory: what is remembered of workers by their ids. ``changes`` is notified when a worker is attached or detached, gets
    its first credit or loses all of it, is empty, and when it may have room that it did not have. The first worker decides
    which model this router serves, for the router's whole life; its weights may be reloaded.
    """

    def __init__(
        self,
        changes: ChangeSignal,
        memory_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = WorkerMemory(memory_seconds, clock)
        self._workers: dict[str, AttachedWorker] = {}
        self._views = WorkerViews()
        self._stale: dict[str, AttachedWorker] = {}
        self.held = Held()
        """The requests and tokens that clients hold of all workers that decode."""
        self.weights = ServedWeights()
        self.embeds_only = False
        """The model has no output head, so that it computes embeddings only."""
        self._changes = changes

    @property
    def workers(self) -> list[AttachedWorker]:
        """The attached workers, oldest first."""
        return list(self._workers.values())

    @property
    def views(self) -> WorkerViews:
        """The workers as a policy reads them now. Only views of workers that have changed since the last call are made."""
        if self._stale:
            for worker in self._stale.values():
                self._views.put(worker.view())
            self._stale.clear()
        return self._views

    def decoding(self) -> TotalCredit:
        """Return the limits of all workers that decode, and who holds how much of them."""
        credits = self.views.decoding
        return TotalCredit(credits.num_workers, credits.max_requests, credits.max_tokens, self.held)

    def get(self, worker_id: str) -> AttachedWorker:
        """Return a worker of ``views``. Call it without an await in between."""
        return self._workers[worker_id]

    def missing(self) -> str | None:
        """Describe which roles no worker has; return None if a request can be placed sooner or later."""
        return missing_role(self.views.sizes, EMBEDDING if self.embeds_only else GENERATION)

    def max_model_len(self, otherwise: int) -> int:
        """Return how many tokens a request may have on the largest of the attached workers, or on both of a pair."""
        return self.views.max_length or otherwise

    def recent_max_model_len(self, otherwise: int) -> int:
        """Return ``max_model_len`` of the attached workers and of those that were detached a moment ago."""
        # a worker that restarts must not make requests fail as too long in the meantime
        gone = self.memory.recent_sizes()
        views = self.views
        return (longest([*views.sizes, *gone]) if gone else views.max_length) or otherwise

    def new_worker(
        self, registration: Registration, calls: WorkerCalls, orders: OrderStream
    ) -> AttachedWorker:
        """Make the record of a worker that is not attached yet."""
        return AttachedWorker(registration, calls, orders, self.held, self._on_change)

    def holder(self, registration: Registration) -> AttachedWorker | None:
        """Return the attached worker that has this worker id and is another process; None if there is none."""
        worker = self._workers.get(registration.worker_id)
        return worker if worker and worker.registration.boot_id != registration.boot_id else None

    def attach(self, worker: AttachedWorker) -> None:
        """Attach a worker. An older stream of the same process is lost.

        Raises InvalidRequestError for an incomplete registration, IncompatiblePeerError for one that does not fit,
        WorkerIdTakenError if another process has its id.
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
        # its process has lost the stream and come back: what was bound to the old one gets no token any more
        if former := self._workers.pop(new.worker_id, None):
            self._forget_view(new.worker_id)
            former.lose(f"it registered again with boot id {new.boot_id}")
        self.weights.adopt(_weights_of(new))
        self.embeds_only = new.embeds_only
        self._workers[new.worker_id] = worker
        self._stale[new.worker_id] = worker
        for other in list(self._workers.values()):
            self.weights.check(other)
        worker.registration = structs.replace(new, num_restarts=self.memory.on_attach(new))
        logger.info("worker %s (%s, boot id %s) attached", worker.name, new.role, new.boot_id)
        self._changes.notify()

    def set_role(self, worker: AttachedWorker, role: Role) -> None:
        """Record that a worker has taken another role, in which it has no leg yet."""
        if role is worker.role:
            return
        logger.info("worker %s was %s and is %s now", worker.name, worker.role.value, role.value)
        worker.registration = structs.replace(worker.registration, role=role.value)
        worker.capacity.set_role(None if role is Role.PREFILL else self.held)
        self._changes.notify()

    def on_loaded(self, worker: AttachedWorker, loaded: LoadedWeights) -> None:
        """Record the weights that a worker has loaded, which all workers may have to have from now on."""
        self.weights.on_loaded(worker, loaded, self.workers)
        self._changes.notify()

    def missing_with(self, worker: AttachedWorker, role: Role) -> frozenset[Role]:
        """Return the roles that no worker would be left for if this one, with its group, took ``role``."""
        group = group_of(self._workers.values(), worker)
        others = (other for other in self._workers.values() if other not in group and other.has_credit)
        # one that was ordered to change may take the next role or keep its own, so it counts for neither
        stay = (each for each in others if not (each.capacity.ordered or each.capacity.changes_role))
        return missing_roles({role, *(other.role for other in stay)}, embeds_only=self.embeds_only)

    def needs_role_of(self, worker: AttachedWorker) -> bool:
        """Return True if a worker must not take its next role; see ``is_role_needed``."""
        next_role = worker.capacity.credit.next_role
        if next_role not in WORKER_ROLES:
            return False
        others = (other for other in self._workers.values() if other is not worker and other.has_credit)
        known = [(other.role, other.capacity.changes_role) for other in others]
        return is_role_needed(worker.role, Role(next_role), known, embeds_only=self.embeds_only)

    def detach(self, worker: AttachedWorker, reason: str) -> None:
        """Detach a worker whose stream has closed. Does nothing for an incarnation that was replaced."""
        # another incarnation may have taken its place while its stream was closing
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
            self._forget_view(worker.name)
            self.memory.on_detach(worker.name, worker.view().size)
            if worker.is_leaving:
                logger.info("worker %s has left", worker.name)
            else:
                logger.warning("worker %s is lost: %s", worker.name, reason)
            worker.lose(reason)
            self._changes.notify()

    def check_integrity(self) -> None:
        """Check that the views are those of the attached workers, in every order. Raises AssertionError."""
        assert list(self.views) == [worker.view() for worker in self._workers.values()]
        self.views.check_integrity()

    def _on_change(self, worker: AttachedWorker, has_more_room: bool) -> None:
        """Replace the view of a worker before it is read again, and report a change that a request may wait for."""
        is_attached = self._workers.get(worker.name) is worker
        if is_attached:
            self._stale[worker.name] = worker
        if not has_more_room:  # then it has neither other credit nor fewer legs
            return
        known = self._views.get(worker.name)
        had_credit = known is not None and known.size.has_credit
        if is_attached and (worker.is_empty or worker.has_credit != had_credit):
            self._changes.notify()
        self._changes.notify_room()

    def _forget_view(self, worker_id: str) -> None:
        self._stale.pop(worker_id, None)
        self._views.remove(worker_id)

    def _check(self, new: Registration) -> None:
        """Raise an error for a registration that is incomplete, or does not fit the attached workers and their model."""
        names = ["worker_id", "boot_id", "address", "control_address", "model_fingerprint", "max_model_len"]
        worker_role(new.role)
        for name in names:
            if not getattr(new, name):
                raise InvalidRequestError(f"the registration of {new.worker_id!r} lacks {name}", param=name)
        if (layout := new.kv_layout) is None:
            raise InvalidRequestError(
                f"the registration of {new.worker_id!r} lacks kv_layout", param="kv_layout"
            )
        if new.protocol_min > WORKER_PROTOCOL_MAX or new.protocol_max < WORKER_PROTOCOL_MIN:
            raise IncompatiblePeerError(
                f"worker {new.worker_id} speaks protocol {new.protocol_min}..{new.protocol_max}, "
                f"this router {WORKER_PROTOCOL_MIN}..{WORKER_PROTOCOL_MAX}"
            )
        if not self.weights.accepts(_weights_of(new)):
            raise IncompatiblePeerError(
                f"worker {new.worker_id} has the model {new.model_name} with fingerprint "
                f"{new.model_fingerprint}, this router serves {self.weights.fingerprint}"
            )
        for other in self._workers.values():
            theirs = other.registration.kv_layout
            differences = layout.differences(theirs) if theirs and theirs != layout else []
            if differences and other.name != new.worker_id:
                raise IncompatiblePeerError(
                    f"no KV can be handed over between worker {new.worker_id} (ours) and worker {other.name} "
                    f"(the peer): {'; '.join(differences)}"
                )


def _weights_of(registration: Registration) -> LoadedWeights:
    return LoadedWeights(model_fingerprint=registration.model_fingerprint, epoch=registration.weights_epoch)


@dataclass(frozen=True)
class _Boot:
    boot_id: str
    num_restarts: int


class WorkerMemory:
    """Owns what a router remembers of workers by their ids.

    seconds: how long the size of a detached worker is remembered, since it may be starting again.
    """

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._gone: dict[str, tuple[float, WorkerSize]] = {}
        self._boots: OrderedDict[str, _Boot] = OrderedDict()
        self.restarts: Counter[str] = Counter()
        """The restarts that this router has seen, by the role of the worker."""

    def on_attach(self, registration: Registration) -> int:
        """Record a process that attaches; return how often this worker was started again, as far as it was reported.

        A process with another boot id is a restart. A supervisor may have restarted it several times since, because it ended
        before it could attach. A router that has started later has only the count of the supervisor.
        """
        before = self._boots.pop(registration.worker_id, None)
        num_restarts = registration.num_restarts
        if before is not None:
            # a process without a supervisor reports no restarts at all
            is_new = before.boot_id != registration.boot_id
            num_restarts = max(num_restarts, before.num_restarts + is_new)
            self.restarts[registration.role] += num_restarts - before.num_restarts
        self._boots[registration.worker_id] = _Boot(registration.boot_id, num_restarts)
        if len(self._boots) > _MAX_NAMES:
            self._boots.popitem(last=False)
        # it is back, and its size is among those of the attached workers
        self._gone.pop(registration.worker_id, None)
        return num_restarts

    def on_detach(self, worker_id: str, size: WorkerSize) -> None:
        """Remember the size of a worker for a while."""
        self._gone[worker_id] = self._clock() + self._seconds, size

    def recent_sizes(self) -> list[WorkerSize]:
        """Return the sizes of the workers that were detached a moment ago."""
        if not self._gone:
            return []
        now = self._clock()
        self._gone = {name: gone for name, gone in self._gone.items() if gone[0] > now}
        return [size for _, size in self._gone.values()]
