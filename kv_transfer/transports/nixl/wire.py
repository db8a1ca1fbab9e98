"""What is said on the data port of the ``nixl`` transport, in frames as everywhere.

The receiver dials, both prove their session (``data_greeting``), the sender answers DataReply, then NixlWelcome, and drives
the library on. The receiver reads slot 0 of the table of generations and block 0 of the pool, sends a NixlAsk to PAUSE,
and after the NixlResting reads slot 0 once more: so it learns whether the lanes between the two need the sender's help.

A read needs no word. Which blocks a lease lends, and the generation that its slot shows, came by the control link in a
BlockGrant; the receiver reads the blocks, and the slot behind the last byte. Only where a read needs help, it sends a
NixlAsk to BEGIN before, and one to END behind it; neither is answered. When the session is over the sender says nothing
more, and ends its half of the connection; it goes on to hear, so that a read that is open then can still be helped.
"""

from enum import StrEnum

import msgspec

from kv_transfer.transports.data_wire import DataStatus

MAX_NIXL_FRAME_BYTES = 262144


class NixlWelcome(msgspec.Struct, frozen=True):
    """How to read the sender's pool: its agent, and where the blocks lie.

    agent: the library's own description of the agent, its ports and its memory. is_device, device_id: the pool is in
    that GPU's memory. table_address: where its table of generations is, in host memory. nonce: what slot 0 of that shows.
    """

    status: DataStatus
    message: str = ""
    agent: bytes = b""
    address: int = 0
    block_bytes: int = 0
    num_blocks: int = 0
    is_device: bool = False
    device_id: int = 0
    table_address: int = 0
    nonce: int = 0


class Help(StrEnum):
    """BEGIN: drive the library on, I read. END: I do not any more. PAUSE: the same, and tell me when you rest."""

    BEGIN = "begin"
    END = "end"
    PAUSE = "pause"


class NixlAsk(msgspec.Struct, frozen=True):
    """What the reader wants of the sender's thread."""

    help: Help


class NixlResting(msgspec.Struct, frozen=True):
    """This reader is not helped any more."""
