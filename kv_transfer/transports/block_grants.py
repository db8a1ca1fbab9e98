"""What a receiver that asks nobody reads blocks by: a BlockGrant per published range, which comes by the control link."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from contract.decoding import decode_outside
from contract.errors import TransferError
from kv_transfer.protocol.reads import ReadRequest
from kv_transfer.transports.generations import NUM_SLOTS

_N = TypeVar("_N", np.int64, np.int32)


class BlockGrant(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the sender's pool, which hold what the lease lends while ``slot`` shows ``generation``.

    packed_ids: the blocks' ids, each of as many bits as the transport copies by (``id_type``: 64 or 32), in the byte order
    of both ends: KV is not turned round either.
    """

    slot: Annotated[int, msgspec.Meta(gt=0, lt=NUM_SLOTS)]
    generation: int
    packed_ids: bytes


_grants = msgspec.msgpack.Decoder(BlockGrant)


def encode_grant(slot: int, generation: int, block_ids: Sequence[int], id_type: "np.dtype[_N]") -> bytes:
    """What the receiver gets by the control link."""
    return msgspec.msgpack.encode(BlockGrant(slot, generation, np.array(block_ids, id_type).tobytes()))


def decode_grant(data: bytes) -> BlockGrant:
    """Raises TransferError for bytes that are no grant."""
    return decode_outside(
        _grants.decode, data, lambda why: TransferError(f"the sender handed out a malformed grant: {why}")
    )


def granted_blocks(
    request: ReadRequest, transport: str, who: str, id_type: "np.dtype[_N]"
) -> tuple[npt.NDArray[_N], set[tuple[int, int]]]:
    """The sender's blocks that are wanted, whether its pool has them or not, and (slot, generation) of what lends them.

    Raises StaleLeaseError for blocks that are not among those that ``who`` granted, TransferError for what is no grant.
    """
    if not request.grants:
        raise TransferError(f"{who} published blocks without a grant for {transport}")
    base = end = request.grants[0].first_block
    packed: list[bytes] = []
    seen: set[tuple[int, int]] = set()
    for given in request.grants:
        grant = decode_grant(given.by_transport.get(transport, b""))
        num_ids, num_left = divmod(len(grant.packed_ids), id_type.itemsize)
        if num_left:
            raise TransferError(f"{who} granted {len(grant.packed_ids)} bytes of block ids")
        end += num_ids
        if end != given.end_block:
            raise TransferError(f"{who} granted other blocks than it published")
        packed.append(grant.packed_ids)
        seen.add((grant.slot, grant.generation))
    start = request.within(end - base, base).start * id_type.itemsize
    return np.frombuffer(b"".join(packed), id_type, request.num_blocks, start), seen
