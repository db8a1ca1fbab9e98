"""What is said on the data port of the ``nccl`` transport, in frames as everywhere.

The receiver dials, both prove their session (``data_greeting``), the sender answers DataReply, then NcclWelcome; then both
join a group of two at its store. Then, per piece: ReadRequest, DataReply, the blocks side by side by the group where the
reply is OK, and a second DataReply: the lease was valid after the last byte, or the piece is STALE.
"""

import msgspec

from kv_transfer.transports.data_wire import DataStatus

MAX_NCCL_FRAME_BYTES = 65536


class NcclWelcome(msgspec.Struct, frozen=True):
    """Where the group meets, and what the sender lends.

    store: "host:port". backend: the library that moves the bytes. device: the GPU's identity; empty in host memory.
    """

    status: DataStatus
    message: str = ""
    store: str = ""
    backend: str = ""
    device: str = ""
    block_bytes: int = 0
