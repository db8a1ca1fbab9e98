"""The open streams to a worker's routers, and what each of them receives: tokens, the load, and a share of the credit.

``AcceptedRequests`` are the requests that routers have given to the worker, with the sessions that they belong to.
``LoadReports`` decides when the load is reported on which stream, and ``RouterSessions`` sends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from contract.membership import Credit, CreditUse, Load, RoleOrder
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, SendTransfer
from engine.scheduling.stats import SchedulerStats
from protos import worker_pb2 as pb
from serving.gpu_memory import GpuMemory, GpuMemoryReader
from wire.messages import from_proto, to_proto
from wire.tokens import step_to_proto
from worker.credit_shares import CreditShares, Use
from worker.lifecycle import Lifecycle
from worker.router_stream import RouterStream

REPORT_SECONDS = 0.5
"""Least time between two reports that differ in averages and totals only, while the engine works."""
DIVIDE_SECONDS = 0.5
"""The time after which the credit is divided again by what each router has used."""


@dataclass(frozen=True)
class Accepted:
    """A request, and the session on whose stream its tokens are sent. since: when its order arrived."""

    request: EngineRequest
    session: str
    since: float


class AcceptedRequests:
    """Owns the choices that are accepted and not finished, by the engine's key, and counts them for each session."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._choices: dict[str, Accepted] = {}
        self._uses: dict[str, Use] = {}
        self._most: dict[str, Use] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def __contains__(self, key: str) -> bool:
        return key in self._choices

    def __iter__(self) -> Iterator[EngineRequest]:
        # A copy: aborts remove choices.
        return (accepted.request for accepted in list(self._choices.values()))

    def of_session(self, session: str) -> list[EngineRequest]:
        """Return the requests of a session, each once."""
        found = (accepted for accepted in self._choices.values() if accepted.session == session)
        return list({id(accepted): accepted.request for accepted in found}.values())

    def add(self, request: EngineRequest, session: str, since: float) -> None:
        """Record all choices of a request that the engine has accepted. since: when its order arrived."""
        self._choices.update(dict.fromkeys(request.keys, Accepted(request, session, since)))
        self._count(session, request.num_choices, request.num_choices * _tokens_of_choice(request))

    def get(self, key: str) -> Accepted | None:
        """Return the request of a choice; None if it has finished."""
        return self._choices.get(key)

    def finish(self, key: str) -> None:
        """Remove a choice whose last output has come. Does nothing the second time."""
        if accepted := self._choices.pop(key, None):
            self._count(accepted.session, -1, -_tokens_of_choice(accepted.request))

    def pop_uses(self) -> dict[str, Use]:
        """Return the most that each session had at once since the last call."""
        # The most, and not what is in use now: between two readings a router may have filled its share and emptied it.
        most = self._most
        self._most = dict(self._uses)
        return most

    def _count(self, session: str, num_requests: int, num_tokens: int) -> None:
        use = self._uses.get(session, Use())
        use = Use(use.num_requests + num_requests, use.num_tokens + num_tokens)
        most = self._most.get(session, Use())
        self._most[session] = Use(
            max(most.num_requests, use.num_requests), max(most.num_tokens, use.num_tokens)
        )
        if use.num_requests:
            self._uses[session] = use
        else:
            self._uses.pop(session, None)


def _tokens_of_choice(request: EngineRequest) -> int:
    """Return about what a choice takes of the worker's tokens; its prompt is divided among the choices."""
    prompt = -(-len(request.prompt_token_ids) // request.num_choices)
    is_prefill = isinstance(request.transfer, SendTransfer) or request.pooling_params is not None
    return prompt if is_prefill else prompt + request.sampling.max_tokens


class LoadReports:
    """Remembers the last report on each stream, by its session.

    gpus: reads the memory of the worker's GPUs; None: no report has any. clock: seconds, monotonic.
    """

    def __init__(
        self,
        gpus: GpuMemoryReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = gpus
        self._clock = clock
        self._last: dict[str, tuple[Load, float]] = {}

    async def keep_measured(self) -> None:
        """Read the memory of the GPUs again and again."""
        if self._gpus:
            await self._gpus.keep_read()

    def forget(self, session: str) -> None:
        """Remove what was sent on a stream that has ended."""
        self._last.pop(session, None)

    def next(self, session: str, stats: SchedulerStats, *, is_idle: bool = False) -> Load | None:
        """Return the load to report on this stream, or None if no report is due.

        A change of what routers decide by is due at once. is_idle: the engine has no work, so that any change is due.
        """
        load = load_of(stats, self._gpus.memory if self._gpus else None)
        now = self._clock()
        if session in self._last:
            last, sent_at = self._last[session]
            # What routers decide by.
            is_other = (
                load.num_running != last.num_running
                or load.num_waiting != last.num_waiting
                or load.kv_cache_usage != last.kv_cache_usage
            )
            is_due = is_idle or is_other or now - sent_at >= REPORT_SECONDS
            if not is_due or load == last:
                return None
        self._last[session] = load, now
        return load


def load_of(stats: SchedulerStats, gpu_memory: GpuMemory | None = None) -> Load:
    """Return the load that an engine's state amounts to, beside the memory of its GPUs."""
    return Load(
        num_running=stats.num_running_reqs,
        num_waiting=stats.num_waiting_reqs,
        kv_cache_usage=stats.kv_cache_usage,
        queued_prompt_tokens=stats.num_queued_prompt_tokens,
        num_free_blocks=stats.num_free_blocks,
        num_leases=stats.num_leases,
        num_fetches=stats.num_fetches,
        prefill_seconds_per_token=stats.prefill_seconds_per_token,
        step_seconds=stats.step_seconds,
        prefix_cache_queries=stats.prefix_cache_stats.queries,
        prefix_cache_hits=stats.prefix_cache_stats.hits,
        gpu_used_bytes=gpu_memory.num_used_bytes if gpu_memory else None,
        gpu_bytes=gpu_memory.num_bytes if gpu_memory else None,
    )


class RouterSessions:
    """Owns the open streams by their sessions, and the division of the worker's credit among them.

    A request belongs to the session for which it was sent: its tokens are sent on that stream only, and the loss of another
    stream does not concern it. credit: returns what the worker accepts now from all routers together. abort: aborts a
    request in the engine. on_order: carries out a message of the router of a session, and returns the outputs of legs that
    are rejected. on_report: called when a router has reported what it holds, or is lost. reports: decides when the
    load is sent on which of them.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        credit: Callable[[], Credit],
        accepted: AcceptedRequests,
        abort: Callable[[EngineRequest], Awaitable[None]],
        on_order: Callable[[pb.RouterMessage, str], Awaitable[list[EngineOutput]]],
        *on_report: Callable[[], None],
        reports: LoadReports,
    ) -> None:
        self._lifecycle = lifecycle
        self._credit = credit
        self._shares = CreditShares(credit())
        self._on_order = on_order
        self._on_report = on_report
        self._accepted = accepted
        self._abort = abort
        self._streams: dict[str, RouterStream] = {}
        self._reports = reports
        self._is_open = asyncio.Event()

    @property
    def is_open(self) -> bool:
        """True while at least one router is attached."""
        return self._is_open.is_set()

    @property
    def has_bound_legs(self) -> bool:
        """True while a router may have a leg bound to this worker, as far as is known."""
        return self._shares.num_committed.num_requests > 0 or self._shares.num_former > 0

    @property
    def are_answered(self) -> bool:
        """True if every router has answered its last credit."""
        return self._shares.are_answered

    @property
    def num_former(self) -> int:
        """Legs of the worker's former role, and moves away from it, by the routers' last reports."""
        return self._shares.num_former

    @property
    def need_role(self) -> bool:
        """True if a router needs the worker in its role, by its last report."""
        return self._shares.need_role

    async def wait_open(self) -> None:
        """Block until a router has accepted this worker."""
        await self._is_open.wait()

    def on_open(self, stream: RouterStream) -> None:
        """See StreamListener."""
        self._streams[stream.session] = stream
        self._is_open.set()
        # Before the credit, which is that of the role: the registration names the one in which the process started.
        if self._lifecycle.role_epoch:
            stream.send(self._role())
        self._send(self._shares.open(stream.session, self._credit(), self._accepted.pop_uses()))

    async def on_message(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        """See StreamListener."""
        if message.HasField("credit_use"):
            use = from_proto(CreditUse, message.credit_use)
            self._send(self._shares.report(stream.session, use))
            self._note_report()
        elif rejected := await self._on_order(message, stream.session):
            stream.send(pb.WorkerMessage(step=step_to_proto(rejected, None)))

    async def on_loss(self, session: str) -> None:
        """Abort the requests of a lost stream, and only those; give its share of the credit to the others."""
        del self._streams[session]
        self._reports.forget(session)
        if not self._streams:
            self._is_open.clear()
        # The share of this router is free only then: its legs still take part of the credit until they are aborted.
        for request in self._accepted.of_session(session):
            await self._abort(request)
        self._send(self._shares.close(session, self._accepted.pop_uses()))
        self._note_report()

    def send_credit(self) -> None:
        """Divide the worker's credit anew and send every router its share, since the credit has changed."""
        self._send(self._shares.set_total(self._credit(), self._accepted.pop_uses()))

    def send_role(self) -> None:
        """Report the worker's role to every router, since it has changed."""
        for stream in self._streams.values():
            stream.send(self._role())

    def send_step(self, outputs: Iterable[EngineOutput], stats: SchedulerStats) -> None:
        """Send the outputs of one step, each to the router of its request; those of lost streams are dropped."""
        by_session: dict[str, list[EngineOutput]] = {}
        for output in outputs:
            key = output.key
            accepted = self._accepted.get(key)  # before ``finish`` forgets it
            if output.timings is not None:
                held = self._accepted.clock() - accepted.since if accepted else 0.0
                output.timings = replace(output.timings, held_seconds=held)
            if output.is_leg_finished:
                self._accepted.finish(key)
            if accepted is not None:
                by_session.setdefault(accepted.session, []).append(output)
        for session, own in by_session.items():
            if stream := self._streams.get(session):
                load = self._reports.next(session, stats)
                stream.send(pb.WorkerMessage(step=step_to_proto(own, load)))

    def send_load(self, stats: SchedulerStats, *, is_idle: bool = False) -> None:
        """Send the load to every router to which a report is due. is_idle: the engine has no work."""
        for session, stream in self._streams.items():
            if load := self._reports.next(session, stats, is_idle=is_idle):
                stream.send(pb.WorkerMessage(load=to_proto(pb.Load, load)))

    async def keep_measured(self) -> None:
        """Read the memory of the worker's GPUs again and again, for the reports."""
        await self._reports.keep_measured()

    async def keep_divided(self, stats: Callable[[], SchedulerStats]) -> None:
        """Divide the credit again and again while there are several routers. A router without tokens gets the load here."""
        while True:
            await asyncio.sleep(DIVIDE_SECONDS)
            if len(self._streams) > 1:
                self._send(self._shares.plan(self._accepted.pop_uses()))
                self.send_load(stats())

    def debug_state(self) -> dict[str, Any]:
        """Return each router's share of the credit and what the worker has of it, as plain data.

        num_overdrawn_credits: reports of routers that held more legs than they were given.
        """
        routers = [
            {
                "router_id": stream.router_id,
                "address": stream.address,
                "max_requests": self._shares.share_of(session).num_requests,
                "max_tokens": self._shares.share_of(session).num_tokens,
                "num_requests": len(self._accepted.of_session(session)),
                "num_unread_bytes": stream.num_unread_bytes,
            }
            for session, stream in self._streams.items()
        ]
        return {"routers": routers, "num_overdrawn_credits": self._shares.num_overdrawn}

    def _note_report(self) -> None:
        for note in self._on_report:
            note()

    def _role(self) -> pb.WorkerMessage:
        taken = RoleOrder(role=self._lifecycle.role.value, epoch=self._lifecycle.role_epoch)
        return pb.WorkerMessage(role_taken=to_proto(pb.RoleTaken, taken))

    def _send(self, credits: Mapping[str, Credit]) -> None:
        for session, credit in credits.items():
            self._streams[session].send(pb.WorkerMessage(credit=to_proto(pb.Credit, credit)))
