"""The ``nixl`` transport's sender: tells peers how to read the pool and which blocks a lease lends. It moves nothing."""

import secrets
from collections.abc import Sequence

from contract.errors import KvbatonError
from engine.connector import KVMemory
from kv_transfer.framing import read_frame, write_frame
from kv_transfer.transport import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_port import DataPort, Visit
from kv_transfer.transports.grants import GrantBook
from kv_transfer.transports.nixl_memory import HostMemory, Region, region_of
from kv_transfer.transports.nixl_owner import NixlOwner
from kv_transfer.transports.nixl_wire import (
    MAX_NIXL_FRAME_BYTES,
    NONCE_BYTES,
    NixlAsk,
    NixlGrant,
    NixlWelcome,
    encode_blocks,
)
from kv_transfer.transports.settings import has_rdma_device
from kv_transfer.transports.tcp_wire import DataStatus


class NixlSender:
    """Owns the data port, the leases and the nonce; ends ``owner``, the agent that it shares with the receiver.

    why_not_offered: None when peers may read over ``nixl``; ``auto`` offers it only where ``tcp`` is not faster.
    """

    def __init__(self, context: TransportContext, owner: NixlOwner) -> None:
        """Open the port."""
        self.why_not_offered: str | None = "the pool is not allocated yet"
        self._owner, self._is_auto = owner, context.is_auto
        self._book = GrantBook(context.on_idle)
        self._nonce = HostMemory(NONCE_BYTES, 1)
        self._nonce.block(0)[:] = secrets.token_bytes(NONCE_BYTES)
        self._welcome = NixlWelcome(DataStatus.DENIED, self.why_not_offered)
        self._port = DataPort(context, "kv-nixl", self._talk)
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Register the pool, for peers and for this worker's own reads; ``why_not_offered`` says the outcome."""
        try:
            pool = region_of(memory)
            agent = self._owner.register(pool, self._nonce.region)
        except KvbatonError as error:
            self.why_not_offered = f"the KV pool cannot be registered: {error.message}"
            return
        self._welcome = NixlWelcome(
            DataStatus.OK,
            agent=agent,
            address=pool.address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            is_device=pool.is_device,
            device_id=pool.device_id,
            nonce_address=self._nonce.region.address,
            nonce=bytes(self._nonce.block(0)),
        )
        self.why_not_offered = _why_slower(pool) if self._is_auto else None

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes:
        """Append blocks to the lease."""
        self._book.extend(name, block_ids)
        return encode_blocks(block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease: what is read of it from now on, or is being read, fails at its reader."""
        self._book.revoke(name)

    def close(self) -> None:
        """End every lease, the port, and the agent. Idempotent."""
        self._book.revoke_all()
        self._port.close()
        self._owner.close()

    def _talk(self, visit: Visit) -> None:
        """Answer a reader."""
        answer: NixlWelcome | NixlGrant = self._welcome
        while True:
            may_read = answer.status is DataStatus.OK and (
                isinstance(answer, NixlWelcome) or bool(answer.block_ids)
            )
            ask = self._say_to_reader(visit, answer) if may_read else _say(visit, answer)
            answer = self._verdict(ask)

    def _say_to_reader(self, visit: Visit, answer: NixlWelcome | NixlGrant) -> NixlAsk:
        """Say that it may read, and drive the library on until it says that it is done, or dies.

        Also when its session is over: else its read might never become terminal, and hold its blocks for ever.
        """
        self._owner.begin_serving()
        try:
            with visit.kept_open():
                return _say(visit, answer)
        finally:
            self._owner.end_serving()

    def _verdict(self, ask: NixlAsk) -> NixlGrant:
        if ask.name is None:
            return NixlGrant(DataStatus.OK)
        try:
            if ask.num_blocks:
                block_ids = self._book.grant(ReadRequest(ask.name, ask.first_block, ask.num_blocks))
                return NixlGrant(DataStatus.OK, block_ids=block_ids)
            self._book.check(ask.name)
        except StaleLeaseError as error:
            return NixlGrant(DataStatus.STALE, error.message)
        return NixlGrant(DataStatus.OK)


def _say(visit: Visit, answer: NixlWelcome | NixlGrant) -> NixlAsk:
    """Answer, and hear the next question."""
    write_frame(visit.sock, answer, MAX_NIXL_FRAME_BYTES)
    return read_frame(visit.sock, NixlAsk, MAX_NIXL_FRAME_BYTES)


def _why_slower(pool: Region) -> str | None:
    """Over plain TCP between host memories the library is slower than ``tcp``."""
    if pool.is_device or has_rdma_device():
        return None
    return "the KV pool is in host memory and there is no RDMA card, so tcp is faster"
