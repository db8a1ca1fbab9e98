"""A group of two processes that moves bytes (NCCL between GPUs, gloo between host memories), and the pool that it reads."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from contract.addresses import join_address
from contract.errors import PeerUnreachableError, TransferError
from engine.connector import KVMemory
from engine.device_pool import DevicePool
from kv_transfer.links.framing import parse_address
from kv_transfer.links.listening import listen_on
from kv_transfer.protocol.reads import BlockPart, PeerSilentError
from kv_transfer.transports.block_views import BlockIds, LandingViews, block_span, read_views
from kv_transfer.transports.nccl.settings import errors_left_to_us
from kv_transfer.transports.transport import TransportSettings

logger = logging.getLogger(__name__)

SENDER = 0
RECEIVER = 1
_TAG = 0
_POLL_SECONDS = 0.2e-3
# Torch's stubs lack the classes for a group without a default group.
_distributed: Any = dist


@dataclass(frozen=True)
class GroupLibrary:
    """torch's groups (``torch.distributed``) and streams (``torch.cuda``)."""

    distributed: Any = _distributed
    cuda: Any = torch.cuda


TORCH = GroupLibrary()


def meet(settings: TransportSettings) -> tuple[str, Any]:
    """Return the address and the store at which a group meets, for its sender. The store listens on ``host`` only."""
    listener = listen_on(settings.host, 0)
    port = listener.getsockname()[1]
    store = _distributed.TCPStore(
        settings.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=settings.read_timeout_seconds),
        master_listen_fd=listener.detach(),
    )
    return join_address(settings.advertise_host or settings.host, port), store


def join(address: str, settings: TransportSettings) -> Any:
    """Return the store of the group's sender. Raises TransferError."""
    host, port = parse_address(address)
    timeout = timedelta(seconds=settings.read_timeout_seconds)
    try:
        return _distributed.TCPStore(host, port, is_master=False, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"the group's store at {address} cannot be reached: {error}") from error


class PairGroup:
    """One of two ranks. Waits for the other one. A call that fails ends the group. Raises PeerUnreachableError.

    place: where the bytes are. On a GPU the group has a stream of its own, so that no step of the engine waits for a peer;
    and this thread waits for the peer with its own deadline, which NCCL does not keep. When the constructor returns, both
    ranks have moved a byte: NCCL forms its communicator, and takes its memory on the device, with the first one.
    """

    def __init__(
        self,
        backend: str,
        store: Any,
        rank: int,
        settings: TransportSettings,
        place: torch.device,
        library: GroupLibrary = TORCH,
    ) -> None:
        self._other = 1 - rank
        self._place = place
        self._library = library
        self._stream = library.cuda.Stream(place) if backend == "nccl" else None
        self._timeout = timedelta(seconds=settings.read_timeout_seconds)
        self._store = library.distributed.PrefixStore("kv", store)
        self._group: Any = None
        begun = time.monotonic()
        try:
            self._group = self._make(backend, rank, settings.advertise_host or settings.host)
            if backend == "nccl":
                self._form(rank, begun)
        except RuntimeError as error:
            raise self._failed(begun, f"the group of two could not be formed: {error}") from error

    def send(self, content: torch.Tensor) -> None:
        """Send all of it."""
        self._wait(self._group.send, content)

    def receive(self, num_bytes: int) -> torch.Tensor:
        """Return so many bytes."""
        with self._own_stream():
            content = torch.empty(num_bytes, dtype=torch.uint8, device=self._place)
        self._wait(self._group.recv, content)
        return content

    def close(self) -> None:
        """End the group, and what the other rank waits for. Idempotent."""
        group = self._group
        self._group = None
        if group is not None:
            group.abort()

    def _make(self, backend: str, rank: int, host: str) -> Any:
        library = self._library.distributed
        if backend == "nccl":
            options = library.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            options.config.blocking = 0  # else nothing ends the wait for a peer that dies while it joins
            with errors_left_to_us():
                return library.ProcessGroupNCCL(self._store, rank, 2, options)
        options = library.ProcessGroupGloo._Options()
        options._devices = [library.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = self._timeout
        return library.ProcessGroupGloo(self._store, rank, 2, options)

    def _form(self, rank: int, begun: float) -> None:
        """Move one byte from the sender to the receiver. Raises RuntimeError if that fails or is not over in time.

        It runs in a thread of its own, which is given up then: NCCL's call may not return before the peer has joined, and
        the caller holds a data connection and a lease.
        """
        group = self._group
        failures: list[RuntimeError] = []
        is_over = threading.Event()
        free_before = self._free_bytes()

        def move_one() -> None:
            try:
                with self._own_stream():
                    content = torch.zeros(1, dtype=torch.uint8, device=self._place)
                    move = group.send if rank == SENDER else group.recv
                    work = move([content], self._other, _TAG)
                    self._poll(work, begun)
                    work.wait(self._timeout)
            except RuntimeError as error:
                failures.append(error)
            is_over.set()

        threading.Thread(target=move_one, name="kv-nccl-form", daemon=True).start()
        if not is_over.wait(self._timeout.total_seconds()):
            failures.append(RuntimeError(f"the peer has not joined in {self._timeout.total_seconds()} s"))
        if failures:
            self._group = None
            threading.Thread(target=group.abort, name="kv-nccl-abort", daemon=True).start()
            raise failures[0]
        free = self._free_bytes()
        logger.info(
            "a group of nccl takes %.0f MiB on %s, of which %.0f MiB are free now (gpu_memory_reserve_bytes)",
            (free_before - free) / 2**20,
            self._place,
            free / 2**20,
        )

    def _free_bytes(self) -> int:
        free: int = self._library.cuda.mem_get_info(self._place)[0]
        return free

    def _own_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._library.cuda.stream(self._stream)

    def _failed(self, begun: float, message: str) -> PeerUnreachableError:
        """Return the error for any failure: the library has only one, so it was silence if the time is over."""
        is_over = time.monotonic() - begun >= self._timeout.total_seconds()
        return PeerSilentError(message) if is_over else PeerUnreachableError(message)

    def _wait(self, move: Any, content: torch.Tensor) -> None:
        begun = time.monotonic()
        try:
            with self._own_stream():
                work = move([content], self._other, _TAG)
                if self._stream is not None:
                    self._poll(work, begun)
                work.wait(self._timeout)
        except RuntimeError as error:
            self.close()
            message = f"the group of two has failed: {str(error).splitlines()[0]}"
            raise self._failed(begun, message) from error

    def _poll(self, work: Any, begun: float) -> None:
        """Wait until the GPU has moved the bytes, after which NCCL's own wait returns at once. Raises RuntimeError."""
        deadline = begun + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() >= deadline:
                raise RuntimeError(f"nothing was moved in {self._timeout.total_seconds()} s")
            time.sleep(_POLL_SECONDS)


class GroupPool:
    """This worker's pool, for a group of two.

    others: bytes of a block of each further group of layers. backend, device: see ``NcclPoolInfo``. place: where the bytes
    of the group of two are.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self.block_bytes = memory.layout.block_bytes
        self.others = tuple(each.layout.block_bytes for each in memory.regions[1:])
        self.backend = "gloo"
        self.device = ""
        self.place = torch.device("cpu")
        on_device = memory.device_pool
        if on_device is not None and on_device.pool.device.type == "cuda":
            self.backend = "nccl"
            self.place = on_device.pool.device
            self.device = str(torch.cuda.get_device_properties(self.place).uuid)

    def gather(
        self, block_ids: BlockIds, part: BlockPart | None = None, region: KVMemory | None = None
    ) -> torch.Tensor:
        """Return these blocks, or the part of each, side by side as bytes; on a device, once it has copied them.

        region: which they are in; None: the first one. Raises TransferError.
        """
        memory = region or self._memory
        if (on_device := memory.device_pool) is not None:
            rows = _rows_of(on_device, part)
            taken: list[torch.Tensor] = []
            on_device.launch(lambda: taken.append(rows[_ids_for(rows, block_ids)])).synchronize()
            return taken[0].view(torch.uint8).flatten()
        content = bytearray().join(read_views(memory, block_ids, part))
        return torch.frombuffer(content, dtype=torch.uint8)

    def scatter(self, content: torch.Tensor, views: Sequence[memoryview]) -> None:
        """Copy the bytes into views of one size, in order; into blocks of their own device without the host."""
        if isinstance(views, LandingViews) and views.memory.pool.device == content.device:
            rows = _rows_of(views.memory, views.part)
            own = content.view(rows.dtype).view(len(views), -1)
            views.land_directly()
            views.memory.launch(partial(_copy_rows, rows, views.ids, own)).synchronize()
            return
        source = content.cpu().numpy().data
        size = views[0].nbytes
        for number, view in enumerate(views):
            view[:] = source[number * size : (number + 1) * size]


def _copy_rows(rows: torch.Tensor, block_ids: BlockIds, content: torch.Tensor) -> None:
    rows.index_copy_(0, _ids_for(rows, block_ids), content)


def _ids_for(rows: torch.Tensor, block_ids: BlockIds) -> torch.Tensor:
    """Return the ids where the rows are. Called in the launched work: the engine's stream would first run its step."""
    return torch.tensor(block_ids, device=rows.device)


def _rows_of(memory: DevicePool, part: BlockPart | None) -> torch.Tensor:
    """Return the blocks of a pool on a device, or the part of each, as rows of its numbers."""
    rows: torch.Tensor = memory.pool.view(memory.num_blocks, -1)
    start, end = block_span(memory.layout.block_bytes, part)
    return rows[:, start // rows.element_size() : end // rows.element_size()]
