"""A worker in its own process that is killed, stopped and started again, always on the same ports."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from contract.errors import ErrorKind, UnavailableError
from contract.identity import Role, new_boot_id
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, ReceiveTransfer
from engine.client import ProcessClient
from engine.connecting import Transfers
from engine.settings import EngineSettings
from kv_transfer.connector import TransferFactory
from kv_transfer.protocol.events import RetryStep
from kv_transfer.settings import TransferSettings
from roles.table import STAGES
from tests.transfer_faults.pool import LAYOUT, start_coded_executor

PEER_TIMEOUT = 0.4
LEASE = 0.25
"""Less than a peer's timeout, so that leases also expire while a link is up."""
_START_SECONDS = 60.0


@dataclass(frozen=True)
class Place:
    """The addresses of a worker."""

    host: str
    advertise_host: str
    control_port: int
    data_port: int


def quiet() -> None:
    """Log only bugs: deaths of peers are expected in these tests."""
    logging.basicConfig(level=logging.CRITICAL, format="%(processName)s %(name)s %(message)s")


@dataclass
class Worker:
    """One worker. Owns its process.

    prepare: called first in the process. is_up: set while it accepts requests. turn: held while it is killed or stopped.
    """

    role: Role
    place: Place
    transport: str
    num_blocks: int
    prepare: Callable[[], None] = quiet
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_starts: int = 0
    _killed: set[str] = field(default_factory=set)

    async def start(self) -> None:
        """Start a new incarnation, with a new boot id."""
        boot_id = new_boot_id()
        engine = EngineSettings(
            model=Path("fake"),
            block_size=LAYOUT.block_size,
            max_num_seqs=8,
            max_num_batched_tokens=12,
            kv_cache_bytes=self.num_blocks,
            remote_kv_timeout_seconds=5.0,
            peer_timeout_seconds=60.0,
        )
        async with asyncio.timeout(_START_SECONDS):
            self.client = await ProcessClient.start(
                engine,
                Transfers(TransferFactory(self._transfer(boot_id)), STAGES),
                start=start_coded_executor,
                prepare=self.prepare,
            )
            self.boot_id = boot_id
            self.pid: int = await self.client.call("pid")
        self.num_starts += 1
        self.is_up.set()

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""
        self._killed.add(self.boot_id)
        self.is_up.clear()
        os.kill(self.pid, signal.SIGKILL)
        await self.client.died.wait()

    def stop(self) -> None:
        """Send SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def has_failed(self) -> bool:
        """True if its process has ended without being killed."""
        return self.client.died.is_set() and self.boot_id not in self._killed

    async def run(self, request: EngineRequest, take: Callable[[EngineOutput], None]) -> None:
        """Run a request and pass all its outputs to ``take``; the last one always has ``is_leg_finished``."""
        boot_id, is_over = self.boot_id, False
        try:
            async for output in self.client.generate(request):
                is_over = output.is_leg_finished
                if output.error_kind == ErrorKind.INTERNAL and boot_id in self._killed:
                    break
                take(output)
        except UnavailableError:
            is_over = False
        if boot_id in self._killed:
            take(EngineOutput.of_error(request, ErrorKind.WORKER_LOST, "it was killed"))
        elif not is_over:
            take(EngineOutput.of_error(request, ErrorKind.INTERNAL, "it ended by itself"))

    async def abort(self, request_id: str, attempt: int | None = None) -> None:
        """Abort the request's legs here. A killed worker has none."""
        await self.client.abort(request_id, attempt)

    def source(self, transfer_id: str) -> ReceiveTransfer:
        """Return the reference by which a decode worker finds this incarnation."""
        return ReceiveTransfer(transfer_id, self.role.value, self.boot_id, self.client.info.control_address)

    async def state(self) -> dict[str, Any]:
        """Return /debug/state; empty if the worker has been killed meanwhile."""
        try:
            state: dict[str, Any] = await self.client.call("debug_state")
        except UnavailableError:
            return {}
        return state

    async def checked_state(self) -> dict[str, Any]:
        """Check the engine's invariants and return /debug/state."""
        await self.client.call("check_integrity")
        state: dict[str, Any] = await self.client.call("debug_state")
        return state

    async def num_pulls_again(self) -> int:
        """Return the number of reads since its start that followed a failed one."""
        counters: dict[str, float] = await self.client.call("counters")
        return int(sum(counters[f"transfer_pulled_again_total{{rung={rung}}}"] for rung in RetryStep))

    async def shut_down(self) -> None:
        """Shut the worker down in order."""
        await self.client.shutdown()

    def _transfer(self, boot_id: str) -> TransferSettings:
        return TransferSettings(
            worker_id=self.role.value,
            boot_id=boot_id,
            role=self.role,
            secret="a secret of the tests, of 32 or more characters",
            host=self.place.host,
            advertise_host=self.place.advertise_host,
            control_port=self.place.control_port,
            data_port=self.place.data_port,
            transport=cast(Any, self.transport),
            peer_timeout_seconds=PEER_TIMEOUT,
            lease_seconds=LEASE,
            parked_seconds=1.5,
            read_timeout_seconds=0.5,
        )
