"""Fakes for tests of hand-overs: a pool without torch, a receiver that damages a block, a driver for one connector."""

import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from contract.layout import KVLayout
from contract.requests import EngineRequest
from engine.connector import (
    Computed,
    ConnectorPair,
    Drained,
    Failed,
    FirstToken,
    KVMemory,
    LayerWatch,
    Published,
)
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.transport import (
    ReceiverTraits,
    ReceiverTransport,
    TransportContext,
    TransportSettings,
)

NUM_EARLY_CHECKS = 3
"""Number of times that the ``shm`` receiver checks for a stop, up to and including its first block."""


def context_of(
    boot_id: str,
    sessions: Sessions | None = None,
    on_idle: Callable[[LeaseName], None] = lambda _name: None,
    **settings: Any,
) -> TransportContext:
    """Return what a transport of the worker with this boot id is opened with."""
    found = TransportSettings(**{"boot_id": boot_id, "read_timeout_seconds": 30.0, **settings})
    return TransportContext(found, sessions or Sessions(), on_idle)


class FilledMemory(KVMemory, Protocol):
    """A pool that a test fills. committed: the committed blocks, in order."""

    committed: list[int]

    def fill(self, block_id: int, content: bytes) -> None:
        """Fill the block with repetitions of ``content``."""


class ByteMemory:
    """A ``KVMemory`` without torch: a memfd where the system has one, else private memory.

    committed: the committed blocks, in order. pool_view: None, so that every block is asked for.
    """

    pool_view: memoryview | None = None
    device_pool = None
    states = None
    start = 0

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.committed: list[int] = []
        num_bytes = layout.block_bytes * num_blocks
        self.memfd = _create_memfd(num_bytes)
        if self.memfd is not None:
            weakref.finalize(self, os.close, self.memfd)
        self._pool = memoryview(mmap.mmap(-1 if self.memfd is None else self.memfd, num_bytes))

    @property
    def regions(self) -> "tuple[ByteMemory, ...]":
        """One: each layer keeps all tokens."""
        return (self,)

    def read_view(self, block_id: int) -> memoryview:
        """Return the block itself."""
        return self._block(block_id)

    def write_view(self, block_id: int) -> memoryview:
        """Return the block itself."""
        return self._block(block_id)

    def commit(self, block_ids: list[int]) -> None:
        """Record the blocks as committed."""
        self.committed.extend(block_ids)

    def synchronize(self) -> None:
        """Do nothing."""

    def mark_computed(self) -> Computed:
        """Return what does not wait: writes are visible at once."""
        return self

    def fill(self, block_id: int, content: bytes) -> None:
        """Fill the block with repetitions of ``content``."""
        size = self.layout.block_bytes
        self._block(block_id)[:] = (content * (size // len(content) + 1))[:size]

    def _block(self, block_id: int) -> memoryview:
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} of a pool of {self.num_blocks}")
        size = self.layout.block_bytes
        return self._pool[block_id * size : (block_id + 1) * size]


class FlatPool(ByteMemory):
    """A pool as on a CPU: layers are written when they are reported, and blocks are read without a call for each."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.pool_view = self._pool


def _create_memfd(num_bytes: int) -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    memfd = os.memfd_create("kvbaton-test-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memfd, num_bytes)
    return memfd


class GatedMemory(ByteMemory):
    """A pool whose reads of ``gated_block`` wait until ``gate`` is set."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.gated_block: int | None = None
        self.gate = threading.Event()
        self.is_waiting = threading.Event()

    def gate_after_digest(self, block_id: int, sender: "TransferDriver") -> None:
        """Have reads of this block wait, once all that ``sender`` lends is digested.

        A transfer may be announced before that, and a block is read again for each group of layers that is digested.
        """

        def is_digested() -> bool:
            leases = sender.scheduler.debug_state()["leases"]
            return all(lent["num_published"] == lent["num_blocks"] for lent in leases)

        sender.wait_for(is_digested, "digested")
        self.gated_block = block_id

    def read_view(self, block_id: int) -> memoryview:
        """Return the block once the gate is open."""
        if block_id == self.gated_block:
            self.is_waiting.set()
            self.gate.wait()
        return super().read_view(block_id)


class GatedRead(Read):
    """A read that waits before its block number ``gated_block`` until ``gate`` is set (``shm``)."""

    def __init__(self, gated_block: int) -> None:
        super().__init__()
        self._checks_left = gated_block + NUM_EARLY_CHECKS
        self.gate, self.is_waiting = threading.Event(), threading.Event()

    def check(self) -> None:
        """Called before every block."""
        self._checks_left -= 1
        if self._checks_left == 0:
            self.is_waiting.set()
            self.gate.wait()
        super().check()


class CorruptingReceiver:
    """Flips a bit of the transfer's block ``block_index`` after it landed and before it is verified, on every read.

    Use ``functools.partial(CorruptingReceiver, block_index=3)`` as ``TransferSettings.decorate``. num_times: how many reads
    to damage; None is all. transport: damage only reads over this one.
    """

    traits = ReceiverTraits()

    def __init__(
        self,
        inner: ReceiverTransport,
        block_index: int,
        num_times: int | None = None,
        transport: str | None = None,
    ) -> None:
        self._inner = inner
        self._block_index = block_index
        self.num_times = num_times
        self._transport = transport

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fetch, then damage. Landed blocks are reported only afterwards: they would be verified undamaged."""
        with read.reporting(lambda _num_blocks: None):
            self._inner.fetch(source, request, views, read)
        if self.num_times == 0 or self._transport not in (None, source.transport):
            return
        for number, view in enumerate(views, request.first_block):
            if number == self._block_index:
                view[len(view) // 2] ^= 0x10
                self.num_times = None if self.num_times is None else self.num_times - 1

    def forget(self, source: Source) -> None:
        """Forward to the real receiver."""
        self._inner.forget(source)

    def close(self) -> None:
        """Close the real receiver."""
        self._inner.close()


@dataclass
class TransferDriver:
    """A small scheduler for one connector: every ``step`` executes the orders and collects the events.

    compute_layer: computes one layer (from 1 on) of a step whose layers are watched. Pass ``driver.wake`` as the factory's
    ``wake``, and the pair to ``attach``.
    """

    memory: FilledMemory
    published: list[str] = field(default_factory=list)
    failed: dict[str, Failed] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    compute_layer: Callable[[int], None] = lambda _number: None
    _awake: threading.Event = field(default_factory=threading.Event)

    def wake(self) -> None:
        """Make ``wait_for`` step again. Thread-safe."""
        self._awake.set()

    def attach(self, pair: ConnectorPair) -> None:
        """Drive this connector from now on."""
        self.scheduler = pair.scheduler
        self.sender = pair.scheduler.sender
        self.receiver = pair.scheduler.receiver
        self.expecting = pair.expecting
        self.rank = pair.ranks.in_process()
        self.address = pair.address
        self.rank.start(self.memory)

    def step(self) -> None:
        """Run one step. Tests fill the pool before it, or in ``compute_layer``."""
        metadata: Any = self.scheduler.build_metadata()
        if metadata is not None:
            if (watch := self.rank.watch_layers(metadata)) is not None:
                self._compute(watch)
            self.rank.execute(metadata)
        sent, received = self.rank.get_finished()
        self.sent.extend(sorted(sent))
        self.received.extend(sorted(received))
        for event in self.receiver.pop_events():
            match event:
                case Published():
                    self.published.append(event.key)
                case Failed():
                    self.failed[event.key] = event
                case Drained():
                    self.drained.append(event.key)

    def _compute(self, watch: LayerWatch) -> None:
        for number in range(1, self.memory.layout.num_layers + 1):
            self.compute_layer(number)
            watch.on_stored(number)
        watch.on_computed()

    def wait_for(self, condition: Callable[[], object], what: str, timeout_seconds: float = 30.0) -> None:
        """Step whenever woken until ``condition`` holds. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_seconds
        self.step()
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{what} did not happen; {self.scheduler.debug_state()}")
            self._awake.wait(min(left, 0.05))
            self._awake.clear()
            self.step()

    def send_all(self, request: EngineRequest, block_ids: list[int], tokens: list[FirstToken]) -> None:
        """Lend a prompt, compute it in one chunk and finish the send."""
        self.sender.open_send(request, block_ids, 0)
        self.sender.publish(request.key, len(request.prompt_token_ids))
        self.step()
        self.sender.finish_send(request.key, tokens)

    def close(self) -> None:
        """Close both halves."""
        self.scheduler.close()
        self.rank.close()
