"""The ``nixl`` transport's receiver: one-sided reads out of a peer's pool, straight into this worker's own.

A posted read cannot be cancelled: ``fetch`` returns when it is terminal, however long that takes. Until then its
blocks stay in quarantine, and nothing else waits.

Some lanes of the library need the peer's thread as well (UCX over TCP), others do not (a copy by the kernel, RDMA). A read
while the peer rests finds out once which kind this is. A wrong guess costs LATE_SECONDS: the peer is asked for help as soon
as a read is late. The library may also read by TCP without a word: reads that another transport would make faster are
logged (``SlowReads``).
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from contract.errors import PeerUnreachableError, TransferError
from contract.layout import KVLayout
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import BlockPart, PeerSilentError, Read, ReadRequest, Source, num_probe_blocks
from kv_transfer.transports.block_views import (
    LandingViews,
    block_outside,
    block_span,
    check_sizes,
)
from kv_transfer.transports.connection_cache import DataPortConnection, PeerReceiver, rate_of
from kv_transfer.transports.data_handshake import DataStatus
from kv_transfer.transports.data_port import shutdown
from kv_transfer.transports.leases import NUM_SLOTS, SLOT_BYTES, granted_blocks, lease_ended
from kv_transfer.transports.nixl.agent import ID_TYPE, Ids, Region
from kv_transfer.transports.nixl.nixl_thread import NixlRead, NixlThread, ReadStep, SlotsStep
from kv_transfer.transports.nixl.remote_pool import MAX_SLOTS_AT_ONCE, DescribedRegion, RemotePool
from kv_transfer.transports.nixl.sender import (
    MAX_NIXL_FRAME_BYTES,
    Help,
    NixlAsk,
    NixlPoolInfo,
    NixlResting,
    agent_name,
    gpu_of,
    region_of,
)
from kv_transfer.transports.transport import ReceiverTraits

logger = logging.getLogger(__name__)
# A read that is open for longer may need its sender's help, which is requested then and for later reads.
LATE_SECONDS = 0.02
# Reads are posted in parts: the CPU may be what moves the bytes, and a stop takes effect between two of them.
_MAX_POST_BYTES = 64 * 2**20
# A device moves as many bytes in a few milliseconds.
_MAX_DEVICE_POST_BYTES = 256 * 2**20
_NONCE_SLOT = (0,)
_FIRST_BLOCK = np.zeros(1, ID_TYPE)
Steps = Sequence[ReadStep | SlotsStep]

# TCP does not read faster between GPUs; CUDA IPC, and RDMA by a card of 25 Gbit/s or more, do.
SLOW_BYTES_PER_SECOND = 3e9
# Smaller reads are not measured: their beginning takes as long as their bytes.
_MEASURED_BYTES = 8 * 2**20
# The fastest of so many reads counts: one alone may have waited for others.
_NUM_MEASURED = 4


class SlowReads:
    """Warns once of a peer whose reads are so slow that the library must have found no fast lane. Thread-safe."""

    def __init__(self, slow_bytes_per_second: float = SLOW_BYTES_PER_SECOND) -> None:
        self._slow = slow_bytes_per_second
        self._lock = threading.Lock()
        self._rates: dict[str, list[float]] = {}
        self._has_warned = False

    def note(self, who: str, num_bytes: int, seconds: float) -> None:
        """Count a read of this peer; the fourth large one of a peer decides about it."""
        if num_bytes < _MEASURED_BYTES:
            return
        with self._lock:
            rates = self._rates.setdefault(who, [])
            if len(rates) == _NUM_MEASURED or self._has_warned:
                return
            rates.append(num_bytes / max(seconds, 1e-9))
            if len(rates) < _NUM_MEASURED or max(rates) >= self._slow:
                return
            self._has_warned = True
        logger.warning(
            "%s is read over nixl at %.3f GB/s only: its library found neither CUDA IPC nor GPUDirect RDMA "
            "between the two. For GPUs of two machines load nvidia-peermem (or a kernel and driver with DMA-BUF) on "
            "both, check UCX_TLS and UCX_NET_DEVICES, or set transport to auto, which takes the fastest",
            who,
            max(rates) / 1e9,
        )

    def forget(self, who: str) -> None:
        """Drop what is known of a peer."""
        with self._lock:
            self._rates.pop(who, None)


class _Lane:
    """Posts reads of one peer's ``pool`` and waits for them; asks the peer's thread for help if they need it.

    _needs_help: the thread must drive the library on while something is read; None after a late read: to be found out.
    """

    def __init__(
        self, sock: socket.socket, pool: RemotePool, nixl_thread: NixlThread, timeout_seconds: float
    ) -> None:
        self.pool = pool
        self._sock = sock
        self._nixl_thread = nixl_thread
        self._timeout_seconds = timeout_seconds
        self._needs_help: bool | None = None
        self._is_helped = True
        self._end = select.poll()
        self._end.register(sock, select.POLLIN)

    def prepare(self, read: Read) -> None:
        """Ask for help if the next read needs it. Raises PeerUnreachableError if the peer has closed the connection."""
        if self._end.poll(0):  # the peer sends only answers, so this is the end of its half of the connection
            raise PeerUnreachableError(f"{self.pool.who} closed its data connection")
        if self._needs_help is None:
            self.find_out(read)
        if self._needs_help:
            self._ask(Help.BEGIN)

    def end_help(self) -> None:
        """End the help for this read, if any."""
        if self._is_helped:
            self._ask(Help.END)

    def find_out(self, read: Read) -> None:
        """Find out, by a read while the peer rests, if reads need help."""
        with read.interruptible(partial(shutdown, self._sock)):
            self._ask(Help.PAUSE)
            read_frame(self._sock, NixlResting, MAX_NIXL_FRAME_BYTES)
        self.read_nonce(read)
        self._needs_help = self._is_helped
        self.end_help()

    def read_nonce(self, read: Read) -> int:
        """Return slot 0 of the peer's table."""
        self.run_bounded([SlotsStep(_NONCE_SLOT)], read)
        return self.pool.found.numbers(1)[0]

    def run(self, steps: Steps) -> None:
        """Read, and wait until that is terminal, however long: it may write to blocks of this worker's pool."""
        posted = self._post(steps)
        if not posted.wait(self._timeout_seconds):
            logger.warning(
                "a read from %s is not terminal after %s s; its blocks stay in quarantine",
                self.pool.who,
                self._timeout_seconds,
            )
            posted.wait(None)
        posted.check()

    def run_bounded(self, steps: Steps, read: Read) -> None:
        """Read into memory of ``pool``, and wait until that is terminal, stopped or too late: it may end at any time."""
        posted = self._post(steps)
        with read.interruptible(posted.wake):
            posted.wait(self._timeout_seconds)
        read.check()
        if not posted.is_terminal:
            raise PeerSilentError(f"nixl read nothing from {self.pool.who} in {self._timeout_seconds} s")
        posted.check()

    def _post(self, steps: Steps) -> NixlRead:
        """Post a read, and ask for help if it is late and has none. It goes on in any case."""
        posted = NixlRead(self.pool, steps)
        self._nixl_thread.post(posted)
        if not posted.wait(LATE_SECONDS) and not self._is_helped:
            self._needs_help = None
            try:
                self._ask(Help.BEGIN)
            except OSError as error:
                logger.debug("%s cannot be asked for help: %s", self.pool.who, error)
        return posted

    def _ask(self, wanted: Help) -> None:
        write_frame(self._sock, NixlAsk(wanted), MAX_NIXL_FRAME_BYTES)
        self._is_helped = wanted is Help.BEGIN


class _Peer(DataPortConnection):
    """The connection to a sender's data port, and the lane to its pool once connected. slow_reads: None for no warning."""

    def __init__(
        self, source: Source, nixl_thread: NixlThread, timeout_seconds: float, slow_reads: SlowReads | None
    ) -> None:
        super().__init__(source, timeout_seconds)
        self._slow_reads = slow_reads
        self._nixl_thread = nixl_thread
        self._lane: _Lane | None = None
        self._gpu = ""
        self._lock = threading.Lock()
        self._is_posted = False

    def interrupt(self) -> None:
        """End a wait for the peer's messages at once, and a posted read when it is terminal: the link is gone.

        Until then the connection stays open, so that the peer goes on helping.
        """
        with self._lock:
            self._is_interrupted = True
            if not self._is_posted:
                super().interrupt()

    def close(self) -> None:
        """Close the connection, and forget the pool as soon as nothing is posted to it."""
        super().close()
        if self._slow_reads:
            self._slow_reads.forget(self._who)
        if self._lane is not None:
            pool = self._lane.pool
            self._nixl_thread.tell(lambda driver: driver.disconnect(pool))

    def connect(self, read: Read) -> _Lane:
        """Return the lane. At the first call, dial and prove by reading that the library reaches the right memory."""
        if self._lane is not None:
            return self._lane
        with read.interruptible(self.interrupt):
            self._dial()
            info = read_frame(self._sock, NixlPoolInfo, MAX_NIXL_FRAME_BYTES)
        if info.status is not DataStatus.OK:
            raise TransferError(f"{self._who} lends nothing over nixl: {info.message}")
        table = Region(info.table_address, SLOT_BYTES, NUM_SLOTS)
        pool = RemotePool(agent_name(self._source.boot_id), self._who, info.regions, table)
        self._gpu = info.gpu
        # Any failure from here on ends in ``close``, which disconnects the pool.
        lane = self._lane = _Lane(self._sock, pool, self._nixl_thread, self._timeout_seconds)
        self._nixl_thread.ask(lambda driver: driver.connect(pool, info.agent))
        if lane.read_nonce(read) != info.nonce:
            raise TransferError(f"nixl reads other memory than that of {self._who}")
        lane.run_bounded([ReadStep(pool.groups[0].bounce_blocks, _FIRST_BLOCK, _FIRST_BLOCK)], read)
        lane.find_out(read)
        return lane

    @property
    def is_on_our_device(self) -> bool:
        """True if the peer's pool is known to be on the GPU of this worker's."""
        memory = self._nixl_thread.memory
        return bool(self._gpu) and memory is not None and gpu_of(memory) == self._gpu

    def probe(self, read: Read) -> float | None:
        """Read the null block into an area of this worker's device, or host memory where a read of blocks goes there."""
        lane = self.connect(read)
        pool = lane.pool
        memory = self._nixl_thread.memory
        on_device = None if memory is None else memory.device_pool
        if on_device is not None and region_of(on_device).is_device == pool.is_device:
            size = pool.groups[0].region.block_bytes
            # The size of a block is a multiple of four bytes in every layout.
            layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=size // 4, block_size=1, dtype="float16")
            area = on_device.landing_area(layout, num_probe_blocks(size))
            region = region_of(area)
            self._nixl_thread.ask(lambda driver: driver.land_in(pool, region, area))
        into = pool.landing or pool.groups[0].bounce_blocks
        into_ids = np.arange(into.region.num_blocks, dtype=ID_TYPE)
        step = ReadStep(into, into_ids, np.zeros_like(into_ids))
        lane.prepare(read)
        rate = rate_of(lambda: lane.run_bounded([step], read), into.region.num_bytes)
        lane.prepare(read)  # if the probe was late, this finds out again whether reads need help
        lane.end_help()
        self._nixl_thread.ask(lambda driver: driver.leave_landing(pool))
        return rate

    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read the blocks, then if their lease has ended. A stop ends it after the posted part, once that is terminal."""
        lane = self.connect(read)
        pool = lane.pool
        region = pool.group(request.group).region
        start, end = block_span(region.block_bytes, request.part)
        check_sizes(views, end - start, self._who)
        block_ids, leases = granted_blocks(request, self._source.transport, self._who, ID_TYPE)
        if len(leases) > MAX_SLOTS_AT_ONCE or len(block_ids) != len(views):
            raise TransferError(f"{len(views)} blocks under {len(leases)} leases are not read at once")
        self._check_link()
        lane.prepare(read)
        slots, generations = zip(*leases, strict=True)
        began = time.monotonic()
        try:
            self._move(lane, request, block_ids, views, SlotsStep(slots), read)
        except TransferError as error:  # the library checks each id
            outside = block_outside(block_ids.astype(np.int64), region.num_blocks)
            if outside is None:
                raise
            message = f"{self._who} granted block {outside} of a pool of {region.num_blocks}"
            raise TransferError(message) from error
        if self._slow_reads:
            self._slow_reads.note(self._who, len(views) * (end - start), time.monotonic() - began)
        lane.end_help()
        if pool.found.numbers(len(slots)) != list(generations):
            raise lease_ended(request, self._who, f"while {len(views)} blocks")

    def _move(
        self,
        lane: _Lane,
        request: ReadRequest,
        block_ids: Ids,
        views: Sequence[memoryview],
        look: SlotsStep,
        read: Read,
    ) -> None:
        """Read part by part. The last one looks at the slots too, which it posts only when its blocks have arrived.

        The blocks go straight into this worker's own pool, or an area of its device; by way of ``bounce`` into other views.
        """
        pool = lane.pool
        group = pool.group(request.group)
        part = request.part
        places = self._places(pool, views, part)
        most = _MAX_DEVICE_POST_BYTES if pool.is_device else _MAX_POST_BYTES
        first, end = block_span(group.region.block_bytes, part)
        step = max(1, most // (end - first))
        if places is None:
            step = group.bounce.region.num_blocks
        for start in range(0, len(views), step):
            here = slice(start, start + step)
            ids = block_ids[here]
            if places is None:
                numbers = np.arange(len(ids), dtype=ID_TYPE)
                blocks = ReadStep(group.bounce_blocks, numbers, ids, part, request.group)
            else:
                into, into_ids = places
                blocks = ReadStep(into, into_ids[here], ids, part, request.group)
            is_last = start + step >= len(views)
            self._run(lane, [blocks, look] if is_last else [blocks], read)
            if places is None:
                for number, view in enumerate(views[here]):
                    view[:] = group.bounce.block(number)[first:end]

    def _places(
        self, pool: RemotePool, views: Sequence[memoryview], part: BlockPart | None
    ) -> tuple[DescribedRegion, Ids] | None:
        """Return the memory of this worker that the views are, and which of its blocks; None if it cannot be read into.

        Memory of a device is read into that of a device only: to or from host memory the library would go through TCP.
        """
        own_blocks = self._nixl_thread.own_blocks
        found = [(own, own.region.find(views, part)) for own in own_blocks]
        places = next(((own, ids) for own, ids in found if ids is not None), None)
        if not isinstance(views, LandingViews) or not own_blocks:
            return places
        area = region_of(views.memory)
        if area.is_device != pool.is_device:
            return None
        if places is None:
            if pool.landing is None or pool.landing.region != area:
                self._nixl_thread.ask(lambda driver: driver.land_in(pool, area, views.memory))
            ids = area.find(views, part)
            if pool.landing is None or ids is None:
                return None
            places = pool.landing, ids
        views.land_directly()
        return places

    def _run(self, lane: _Lane, steps: Steps, read: Read) -> None:
        """Run steps. Raises ReadStoppedError before and after them, TransferError without a link."""
        read.check()
        with self._lock:
            self._check_link()
            self._is_posted = True
        try:
            lane.run(steps)
        finally:
            with self._lock:
                self._is_posted = False
        self._check_link()
        read.check()


class NixlReceiver(PeerReceiver):
    """Owns the connections to peers, and with them the agent. slow_reads: None for no warning."""

    def __init__(
        self, nixl_thread: NixlThread, timeout_seconds: float, slow_reads: SlowReads | None = None
    ) -> None:
        super().__init__(
            partial(_Peer, nixl_thread=nixl_thread, timeout_seconds=timeout_seconds, slow_reads=slow_reads)
        )
        self._nixl_thread = nixl_thread
        self.traits = ReceiverTraits(is_on_our_device=self.is_on_our_device)

    def is_on_our_device(self, source: Source) -> bool:
        """See ReceiverTraits."""
        connection = self._unused(source)
        return isinstance(connection, _Peer) and connection.is_on_our_device

    def close(self) -> None:
        """Close every connection, and the agent: a read that is not terminal fails."""
        super().close()
        self._nixl_thread.close()
