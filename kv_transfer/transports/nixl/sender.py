"""The ``nixl`` transport's sender: describes the pool to peers, and ends leases by a table of generations.

It moves no bytes. Its thread only drives the library on if a reader's lane needs that.

After the handshake on the data port (``data_handshake``) the sender sends NixlPoolInfo and drives the library on. The
receiver reads slot 0 of the table of generations and block 0 of the pool, sends a NixlAsk to PAUSE, and after the
NixlResting reads slot 0 once more: so it finds out if the lanes between the two need the sender's help.

A read needs no message. The blocks of a lease and its generation came on the control link in a BlockGrant; the
receiver reads the blocks, and the slot after the last byte. If reads need help, it sends a NixlAsk to BEGIN before,
and one to END after each; neither is answered. When the session is over the sender ends its half of the connection
and sends no more. It goes on to receive, so that a read that is open then can still be helped.
"""

import logging
from contextlib import ExitStack
from dataclasses import asdict
from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from contract.decoding import Count, Unsigned
from contract.errors import KvbatonError, TransferError
from engine.connector import KVMemory
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.transports.block_views import address_of
from kv_transfer.transports.data_handshake import DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.leases import NUM_SLOTS, SLOT_BYTES, GenerationTable, Sender
from kv_transfer.transports.nixl.agent import ID_TYPE, NixlLibrary, Region
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.nixl.settings import has_rdma_device, require_whole_allocations
from kv_transfer.transports.transport import AUTO, TransportContext

logger = logging.getLogger(__name__)
MAX_NIXL_FRAME_BYTES = 262144
# After the end of its connection a peer is helped for so long: a read may be open, and it cannot ask for help any more.
_HELP_ON_SECONDS = 60.0


class NixlPoolInfo(msgspec.Struct, frozen=True):
    """The sender's pool, and how to read it.

    agent: the library's own description of the agent, its ports and its memory. is_device, device_id: the pool is in
    that GPU's memory. others: (address, bytes of a block, blocks) of each further group of layers; not sent if there are
    none. table_address: the table of generations, in host memory. nonce: the value of its slot 0. gpu: the
    GPU's UUID, if known.
    """

    status: DataStatus
    message: str = ""
    agent: bytes = b""
    address: Unsigned = 0
    block_bytes: Unsigned = 0
    num_blocks: Count = 0
    is_device: bool = False
    device_id: Count = 0
    table_address: Unsigned = 0
    nonce: Unsigned = 0
    gpu: str = ""
    others: tuple[tuple[Unsigned, Unsigned, Count], ...] | UnsetType = UNSET

    @property
    def regions(self) -> list[Region]:
        """The pool of each group of layers."""
        others = () if self.others is UNSET else self.others
        pools = [(self.address, self.block_bytes, self.num_blocks), *others]
        return [Region(*pool, self.is_device, self.device_id) for pool in pools]


class Help(StrEnum):
    """BEGIN: drive the library on, a read begins. END: the read is over. PAUSE: the same, and confirm that you rest."""

    BEGIN = "begin"
    END = "end"
    PAUSE = "pause"


class NixlAsk(msgspec.Struct, frozen=True):
    """The reader's request to the sender's thread."""

    help: Help


class NixlResting(msgspec.Struct, frozen=True):
    """The answer to PAUSE: this reader is not helped any more."""


def agent_name(boot_id: str) -> str:
    """Return the name of the agent of this incarnation of a worker."""
    return f"kvbaton-{boot_id}"


class NixlSender(Sender):
    """Owns the data port, the table of its leases, and ``nixl_thread``, whose agent it shares with the receiver.

    why_not_offered: None when peers may read over ``nixl``; ``auto`` offers it only where ``tcp`` is not faster.
    pool_info: the first message to a reader.
    """

    leases: GenerationTable

    def __init__(self, context: TransportContext, library: NixlLibrary) -> None:
        """Start the agent and open the port. Raises SettingError, OSError."""
        self.why_not_offered = "the pool is not allocated yet"
        self.pool_info = NixlPoolInfo(DataStatus.DENIED, self.why_not_offered)
        self._is_auto = context.settings.transport == AUTO
        with ExitStack() as undo:
            super().__init__(GenerationTable(context.on_idle, ID_TYPE))
            undo.callback(self.leases.close)
            name = agent_name(context.settings.boot_id)
            self.nixl_thread = NixlThread(library, name, context.on_thread_failed)
            undo.callback(self.nixl_thread.close)
            self._port = DataPort(context, "kv-nixl", self._serve, transport="nixl")
            undo.callback(self._port.close)
            undo.callback(self.leases.revoke_all)
            self._undo = undo.pop_all()
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Register the pool, for peers and for this worker's own reads. ``why_not_offered`` has the outcome."""
        table = Region(self.leases.address, SLOT_BYTES, NUM_SLOTS)
        try:
            pools = list(map(region_of, memory.regions))
            agent = self.nixl_thread.ask(lambda driver: driver.register(pools, table))
        except KvbatonError as error:
            self.why_not_offered = f"the KV pool cannot be registered: {error.message}"
            return
        self.nixl_thread.memory = memory
        pool, *others = pools
        self.pool_info = NixlPoolInfo(
            DataStatus.OK,
            agent=agent,
            **asdict(pool),
            table_address=table.address,
            nonce=self.leases.nonce,
            gpu=gpu_of(memory),
            others=tuple((each.address, each.block_bytes, each.num_blocks) for each in others) or UNSET,
        )
        self.why_not_offered = None
        if not (pool.is_device or has_rdma_device()):
            why = "the KV pool is in host memory and there is no RDMA card, so tcp is faster"
            if self._is_auto:
                self.why_not_offered = why
            else:
                logger.warning("transport nixl: %s; set transport to tcp or auto", why)

    def close(self) -> None:
        """End every lease, the port, and the agent. Idempotent."""
        self._undo.close()

    def _serve(self, connection: Connection) -> None:
        """Send the pool's description, and help the reader as it asks until the connection ends."""
        with connection.receiving_on():
            try:
                write_frame(connection.sock, self.pool_info, MAX_NIXL_FRAME_BYTES)
                wanted = Help.BEGIN
                while self.pool_info.status is DataStatus.OK:
                    if wanted is Help.BEGIN:
                        self.nixl_thread.tell(lambda driver: driver.serve(connection))
                    else:
                        self.nixl_thread.ask(lambda driver: driver.rest(connection))
                    if wanted is Help.PAUSE:
                        write_frame(connection.sock, NixlResting(), MAX_NIXL_FRAME_BYTES)
                    wanted = read_frame(connection.sock, NixlAsk, MAX_NIXL_FRAME_BYTES).help
            finally:
                self.nixl_thread.tell(lambda driver: driver.serve_lost(connection, _HELP_ON_SECONDS))


def gpu_of(memory: KVMemory) -> str:
    """Return the UUID of the GPU that a pool is on; empty if it is on none."""
    on_device = memory.device_pool
    if on_device is None or on_device.pool.device.type != "cuda":
        return ""
    import torch

    return str(getattr(torch.cuda.get_device_properties(on_device.pool.device), "uuid", ""))


def region_of(memory: KVMemory) -> Region:
    """Return the pool's region. Raises TransferError if its blocks do not lie side by side, or peers cannot read it."""
    size = memory.layout.block_bytes
    count = memory.num_blocks
    if (on_device := memory.device_pool) is not None:
        device = on_device.pool.device
        if device.type == "cuda":
            require_whole_allocations()
        return Region(on_device.address, size, count, device.type == "cuda", device.index or 0)
    first, last = (address_of(memory.write_view(number)) for number in (0, count - 1))
    if last != first + (count - 1) * size:
        raise TransferError("the KV pool is not in one piece of memory")
    return Region(first, size, count)
