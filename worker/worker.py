"""One worker: an engine client, the gRPC service that feeds it, and the stream on which its tokens leave."""

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from contract.errors import CancelledError, InvalidRequestError, KvbatonError, UnavailableError
from contract.identity import Role
from contract.membership import Credit, Load, Registration
from contract.model_folder import MAX_TOKENIZER_BYTES, read_bytes
from contract.requests import EngineRequest
from engine.client import EngineClient
from protos import PROTOCOL_MAX, PROTOCOL_MIN
from protos import worker_pb2 as pb
from serving.cluster_tls import ClusterTls, worker_tls
from serving.process_facts import facts_of
from text.model_card import MODEL_FILES
from wire.membership import credit_to_proto, load_to_proto, registration_to_proto
from wire.tokens import step_to_proto
from worker.link import RouterLink
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

MAX_EARLY_CANCELS = 1024
GOODBYE_SECONDS = 1.0
_CHUNK_BYTES = 2**20
_QUEUED_STEPS = 2
"""Steps full of prompt tokens that a prefill worker takes on beforehand, so that it never waits for the router."""


@dataclass(frozen=True)
class WorkerIdentity:
    """Who a worker is: its role, its name in the cluster, and this process start."""

    role: Role
    worker_id: str
    boot_id: str


class Worker:
    """Owns the requests that a router gave to this process, from acceptance until the engine is done with them."""

    def __init__(self, identity: WorkerIdentity, settings: WorkerSettings, engine: EngineClient) -> None:
        self.identity = identity
        self.engine = engine
        self._settings = settings
        self._link: RouterLink | None = None
        self._running = asyncio.Event()
        self._accepted: dict[str, EngineRequest] = {}
        self._early_cancels: OrderedDict[tuple[str, int | None], int] = OrderedDict()
        self._told: tuple[str, Load] | None = None

    @property
    def is_ready(self) -> bool:
        """True while a router is attached and the engine lives."""
        return self._link is not None and self._link.is_attached

    def missing(self) -> str | None:
        """Return why the worker cannot do its work at the moment; None if it can."""
        if (complaint := self.engine.complaint) is not None:
            return f"the engine cannot be relied on: {complaint}"
        return None if self.is_ready else "no router is attached"

    async def wait_ready(self) -> None:
        """Block until a router has welcomed this worker."""
        await self._running.wait()
        if self._link:
            await self._link.wait_attached()

    @property
    def model_folder(self) -> Path:
        """The model's files."""
        return self._settings.model

    @cached_property
    def tls(self) -> ClusterTls:
        """What proves this worker to a router, and routers to it. Raises SettingError without a usable secret."""
        return worker_tls(self._settings.read_secret(), self.identity.worker_id, self.identity.boot_id)

    @property
    def num_requests(self) -> int:
        """Requests accepted and not finished."""
        return len(self._accepted)

    async def run(self, address: str, admin_address: str) -> None:
        """Register at the router and carry tokens to it until cancelled. Ends with an error when the engine died."""
        registration = self._registration(address, admin_address)
        self._link = RouterLink(
            self._settings.router,
            self.tls,
            registration_to_proto(registration),
            credit_to_proto(self._credit()),
            self.abort_all,
            self._settings.peer_timeout_seconds,
        )
        self._running.set()
        ended_by: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._link.run())
                tasks.create_task(self._pump(self._link))
                tasks.create_task(self._report_load(self._link))
        except* KvbatonError as group:
            ended_by.extend(group.exceptions)
        if ended_by:  # what the handler itself raises comes in a group again on some Pythons (3.11.2)
            raise ended_by[0]

    async def leave(self) -> None:
        """Abort everything and say goodbye to the router, so that it does not take the end for a death."""
        await self.abort_all()
        if self._link:
            with suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_SECONDS):
                    await self._link.leave()

    async def accept(self, request: EngineRequest, session: str = "") -> None:
        """Give a request to the engine; its tokens go out on the stream of this session (empty: on whichever is open).

        Raises InvalidRequestError, or UnavailableError while that stream is not open.
        """
        if self._link is None or not self._link.is_attached:
            raise UnavailableError(f"worker {self.identity.worker_id} is not attached to a router")
        if session not in ("", self._link.session):
            raise UnavailableError(
                f"worker {self.identity.worker_id} has lost the stream that this request came for"
            )
        dismissed = [choice for choice in request.choices if self._was_cancelled(request, choice)]
        if len(dismissed) == request.num_choices:
            raise CancelledError(f"request {request.request_id} was cancelled before it arrived")
        request.check(self.engine.info.vocab_size)
        if any(key in self._accepted for key in request.keys):
            raise InvalidRequestError(
                f"request {request.key} is here already; a replay needs a higher attempt"
            )
        await self.engine.add_request(request)
        self._accepted.update(dict.fromkeys(request.keys, request))
        for choice in dismissed:
            await self.engine.abort(request.request_id, request.attempt, choice)

    def _was_cancelled(self, request: EngineRequest, choice: int) -> bool:
        cancels = [(request.request_id, None), (request.request_id, choice)]
        return any(self._early_cancels.get(cancel, -1) >= request.attempt for cancel in cancels)

    async def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) up to ``attempt``; for one that is on its way remember the wish."""
        here = (r for r in self._accepted.values() if r.request_id == request_id and r.attempt <= attempt)
        if not any(choice is None or choice in request.choices for request in here):
            cancel = request_id, choice
            self._early_cancels[cancel] = max(attempt, self._early_cancels.pop(cancel, -1))
            if len(self._early_cancels) > MAX_EARLY_CANCELS:
                self._early_cancels.popitem(last=False)
        await self.engine.abort(request_id, attempt, choice)

    async def abort_all(self) -> None:
        """Abort everything: the router that asked for it is gone."""
        for request in list(self._accepted.values()):
            await self.engine.abort(request.request_id, request.attempt)

    async def debug_state(self) -> dict[str, Any]:
        """Blocks, leases, transfers and requests as plain data, and the engine process's own facts."""
        state: dict[str, Any] = await self.engine.call("debug_state")
        return {
            "worker_id": self.identity.worker_id,
            "boot_id": self.identity.boot_id,
            "role": self.identity.role.value,
            "attached": self.is_ready,
            "num_accepted": self.num_requests,
            "engine_process": facts_of(await self.engine.call("pid")),
            **state,
        }

    async def model_files(self) -> AsyncIterator[tuple[str, bytes]]:
        """Yield the model's small files in pieces (name, bytes to append), for a router without the folder."""
        for name in MODEL_FILES:
            path = self._settings.model / name
            data = await asyncio.to_thread(read_bytes, path, MAX_TOKENIZER_BYTES) or b""
            for start in range(0, len(data), _CHUNK_BYTES):
                yield name, data[start : start + _CHUNK_BYTES]

    async def _pump(self, link: RouterLink) -> None:
        """All new tokens of one step go to the router in one message.

        What a dead engine's requests end with stays here: they are not at fault, and the end of the stream tells the
        router that it may go on with them elsewhere.
        """
        async for outputs in self.engine.steps():
            if self.engine.died.is_set():
                break
            for output in outputs:
                if output.is_leg_finished:
                    self._accepted.pop(output.key, None)
            if outputs:
                step = step_to_proto(outputs, self._new_load(link))
                link.send(pb.WorkerMessage(step=step))
        raise UnavailableError(f"the engine of worker {self.identity.worker_id} has stopped")

    async def _report_load(self, link: RouterLink) -> None:
        """What has changed since the last tokens, once the engine has nothing to do: blocks that nobody reads any more."""
        while True:
            await self.engine.idled.wait()
            self.engine.idled.clear()
            if load := self._new_load(link):
                link.send(pb.WorkerMessage(load=load_to_proto(load)))

    def _new_load(self, link: RouterLink) -> Load | None:
        """Return how busy the engine is, or None if that is unchanged since the last report to this router."""
        stats = self.engine.stats
        load = Load(
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
            kv_cache_usage=stats.kv_cache_usage,
        )
        if self._told == (link.session, load):
            return None
        self._told = link.session, load
        return load

    def _credit(self) -> Credit:
        """What this worker takes on at once: prompts up to its queue's limit, or what its KV cache holds."""
        settings = self._settings
        info = self.engine.info
        kv_tokens = (info.num_blocks - 1) * info.layout.block_size
        queued = settings.max_queued_tokens or _QUEUED_STEPS * settings.max_num_batched_tokens
        is_prefill = self.identity.role is Role.PREFILL
        return Credit(
            max_requests=settings.max_num_seqs, max_tokens=min(queued, kv_tokens) if is_prefill else kv_tokens
        )

    def _registration(self, address: str, admin_address: str) -> Registration:
        info = self.engine.info
        return Registration(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            worker_id=self.identity.worker_id,
            boot_id=self.identity.boot_id,
            role=self.identity.role.value,
            address=address,
            control_address=info.control_address,
            model_name=model_name(self._settings),
            model_fingerprint=info.model_fingerprint,
            kv_layout=info.side.whole,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            vocab_size=info.vocab_size,
            admin_address=admin_address,
            pid=os.getpid(),
            embeds_only=not info.has_head,
        )


def model_name(settings: WorkerSettings) -> str:
    """The name under which the model is served."""
    return settings.served_model_name or settings.model.name
