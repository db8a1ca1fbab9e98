"""One worker that is attached to this router, and the legs that are bound to it."""

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from contract.errors import WorkerLostError
from contract.identity import Role
from contract.membership import Credit, DrainOrder, Registration, RoleOrder
from protos import worker_pb2 as pb
from router.routing.running_shares import Held
from router.routing.views import UNLIMITED, WorkerView
from router.tokens.inbox import Event
from router.workers.capacity import WorkerCapacity
from router.workers.leg_routes import LegKey, LegRoutes
from router.workers.order_stream import OrderStream
from router.workers.worker_calls import WorkerCalls
from router.workers.worker_latency import WorkerLatency
from wire.membership import credit_use_to_proto, drain_to_proto, load_from_proto, role_change_to_proto

_ROLES = {role.value: role for role in Role}


class AttachedWorker:
    """One incarnation of a worker, from its registration until its stream closes.

    Owns the routes of its stream: which leg receives which entries. gone: set when the worker is detached; whatever it
    sends after that is dropped, even if it is still alive. session: names this incarnation's stream. is_leaving: one side
    has ended the stream on purpose. orders: what is sent to it. held: counts what clients hold of all workers that decode.
    on_change: called when its view has changed, with True if it may have room that it did not have.
    """

    def __init__(
        self,
        registration: Registration,
        calls: WorkerCalls,
        orders: OrderStream,
        held: Held,
        on_change: "Callable[[AttachedWorker, bool], None]",
    ) -> None:
        self.registration = registration
        self._started_at = time.monotonic() - registration.age_seconds
        self.calls = calls
        self.orders = orders
        self.session = secrets.token_hex(8)
        is_counted = registration.role != Role.PREFILL
        self.capacity = WorkerCapacity(
            held if is_counted else None, partial(on_change, self), self.report_use
        )
        self.gone = asyncio.Event()
        self.is_leaving = False
        self.latency = WorkerLatency()
        self._routes = LegRoutes()

    @cached_property
    def name(self) -> str:
        """The worker id."""
        return self.registration.worker_id

    @cached_property
    def _pool_tokens(self) -> int:
        """The tokens that the worker's KV pool holds; block 0 is the null block."""
        registration = self.registration
        if not registration.num_blocks:
            return UNLIMITED
        layout = registration.kv_layout
        return (registration.num_blocks - 1) * (layout.block_size if layout else 0)

    @property
    def role(self) -> Role:
        """The role in which it has registered, or that it has taken since."""
        return _ROLES[self.registration.role]

    @property
    def has_credit(self) -> bool:
        """True if it takes requests at all, however many it and its other routers have now."""
        capacity = self.capacity
        return not self.is_leaving and (capacity.credit.max_requests > 0 or capacity.waits_for_credit)

    @property
    def is_empty(self) -> bool:
        """True if it drains, holds and lends nothing, and no leg of this router is on its way to it."""
        capacity = self.capacity
        return capacity.credit.is_empty and not capacity.num_requests and not capacity.former.num_legs

    @property
    def age_seconds(self) -> float:
        """The time since its process started."""
        return time.monotonic() - self._started_at

    def leave(self) -> None:
        """Record that one side ends the stream on purpose: it gets no more requests."""
        self.is_leaving = True
        self.capacity.grant(Credit())

    def bind(self, key: LegKey, receive: Callable[[Event], None]) -> None:
        """Pass the entries of a leg to ``receive``, and a WorkerLostError if the worker is lost."""
        self._routes.bind(key, receive)

    def unbind(self, key: LegKey) -> None:
        """Drop whatever else the worker sends for a leg. Does nothing the second time."""
        self._routes.unbind(key)

    def deliver(self, step: pb.StepOutput) -> None:
        """Pass the entries of one step to their legs. Entries of older attempts and unknown requests are dropped."""
        self.latency.note_step(len(step.entries), self.capacity.load.num_running)
        if self.gone.is_set():
            self._routes.drop(step.entries)
        else:
            self._routes.deliver(step.entries)
        if step.HasField("load"):
            self.capacity.report_load(load_from_proto(step.load))

    def lose(self, reason: str) -> None:
        """Detach the worker: every leg that is bound to it receives a WorkerLostError."""
        self.gone.set()
        self._routes.fail(lambda: WorkerLostError(f"worker {self.name} was lost with the request: {reason}"))

    def drain(self, order: DrainOrder) -> None:
        """Send the worker the request to drain. It answers with its credit."""
        self.orders.send(pb.RouterMessage(drain=drain_to_proto(order)))

    def flip(self, order: RoleOrder) -> None:
        """Send the worker the request to take another role. It reports the role when every router has answered."""
        self.capacity.ordered = order
        self.orders.send(pb.RouterMessage(role_change=role_change_to_proto(order)))

    def report_use(self) -> None:
        """Send the worker what this router holds of its last credit, unless that has no number.

        It is the answer to every credit, and is sent once more when nothing is left of the worker's former state.
        """
        if self.capacity.credit.number:
            use = credit_use_to_proto(self.capacity.use())
            self.orders.send(pb.RouterMessage(credit_use=use))

    def undrain(self) -> None:
        """Send the worker the request to serve again."""
        self.orders.send(pb.RouterMessage(undrain=pb.Undrain()))

    def view(self) -> WorkerView:
        """Return the worker as a policy reads it."""
        capacity = self.capacity
        return WorkerView(
            worker_id=self.name,
            role=self.role,
            num_requests=capacity.num_requests,
            num_tokens=capacity.num_tokens,
            max_requests=0 if self.is_leaving else capacity.credit.max_requests,
            max_tokens=capacity.credit.max_tokens,
            waits_for_credit=capacity.waits_for_credit and not self.is_leaving,
            is_unsettled=capacity.credit.is_unsettled,
            num_running=capacity.load.num_running,
            num_waiting=capacity.load.num_waiting,
            kv_cache_usage=capacity.load.kv_cache_usage,
            max_length=self.registration.max_model_len,
            pool_tokens=self._pool_tokens,
        )

    def debug_state(self) -> dict[str, Any]:
        """Return plain data for ``/debug/state``."""
        reg = self.registration
        capacity = self.capacity
        return {
            "worker_id": reg.worker_id,
            "boot_id": reg.boot_id,
            "role": reg.role,
            "pid": reg.pid,
            "address": reg.address,
            "control_address": reg.control_address,
            "admin_address": reg.admin_address,
            "num_running": capacity.load.num_running,
            "num_waiting": capacity.load.num_waiting,
            "kv_cache_usage": capacity.load.kv_cache_usage,
            "max_requests": capacity.credit.max_requests,
            "max_tokens": capacity.credit.max_tokens,
            "is_draining": capacity.credit.is_draining,
            "is_empty": capacity.credit.is_empty,
            "num_legs": capacity.num_requests,
            "num_leg_tokens": capacity.num_tokens,
            "num_former_legs": capacity.former.num_legs,
            "is_unsettled": capacity.credit.is_unsettled,
            "num_stale_entries": self._routes.num_stale_entries,
        }
