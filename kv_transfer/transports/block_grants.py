"""What a receiver that asks nobody reads blocks by: a BlockGrant per published range, which comes by the control link."""

from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from contract.errors import TransferError
from kv_transfer.transport import ReadRequest
from kv_transfer.transports.generations import NUM_SLOTS

_ID, _ID_BYTES = "q", array("q").itemsize


class BlockGrant(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the sender's pool, which hold what the lease lends while ``slot`` shows ``generation``.

    packed_ids: the blocks' ids, 64 bits each, in the byte order of both ends: KV is not turned round either.
    """

    slot: Annotated[int, msgspec.Meta(gt=0, lt=NUM_SLOTS)]
    generation: int
    packed_ids: bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self.packed_ids) // _ID_BYTES


def unpack_ids(grants: Sequence[BlockGrant]) -> npt.NDArray[np.int64]:
    """The blocks of all of them, in order."""
    packed = grants[0].packed_ids if len(grants) == 1 else b"".join([grant.packed_ids for grant in grants])
    return np.frombuffer(packed, np.int64)


_grants = msgspec.msgpack.Decoder(BlockGrant)


def encode_grant(slot: int, generation: int, block_ids: Sequence[int]) -> bytes:
    """What the receiver gets by the control link."""
    return msgspec.msgpack.encode(BlockGrant(slot, generation, array(_ID, block_ids).tobytes()))


def decode_grant(data: bytes) -> BlockGrant:
    """Raises TransferError for bytes that are no grant."""
    try:
        grant = _grants.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the sender handed out a malformed grant: {error}") from error
    if len(grant.packed_ids) % _ID_BYTES:
        raise TransferError(f"the sender granted {len(grant.packed_ids)} bytes of block ids")
    return grant


def granted_blocks(
    request: ReadRequest, transport: str, who: str
) -> tuple[npt.NDArray[np.int64], set[tuple[int, int]]]:
    """The sender's blocks that are wanted, whether its pool has them or not, and (slot, generation) of what lends them.

    Raises StaleLeaseError for blocks that are not among those that ``who`` granted, TransferError for what is no grant.
    """
    if not request.grants:
        raise TransferError(f"{who} published blocks without a grant for {transport}")
    base = end = request.grants[0].first_block
    grants: list[BlockGrant] = []
    for given in request.grants:
        grant = decode_grant(given.by_transport.get(transport, b""))
        grants.append(grant)
        end += grant.num_blocks
        if end != given.end_block:
            raise TransferError(f"{who} granted other blocks than it published")
    block_ids = unpack_ids(grants)[request.within(end - base, base)]
    return block_ids, {(grant.slot, grant.generation) for grant in grants}
