"""What is said on the Unix socket of the ``shm`` transport, in frames as everywhere.

The receiver dials, and both prove their session (``data_greeting``). The sender says ShmWelcome; with an OK come three
descriptors by SCM_RIGHTS: the pool and the table of generations, both read-only, and a pidfd of the sender's process.
Nothing else is said: the connection stays open as long as the session, and its end is the end of all reads.

Which blocks a lease lends comes by the control link, in a BlockGrant per published range. The receiver copies them out of
the pool and compares the generation before and afterwards; the sender never learns of that and never waits for it.
"""

from typing import Annotated

import msgspec
import numpy as np

from kv_transfer.transports.data_wire import DataStatus

MAX_SHM_FRAME_BYTES = 65536
NUM_DESCRIPTORS = 3
ID_TYPE = np.dtype(np.int64)
"""The copy takes 64-bit block ids as they are."""


class ShmWelcome(msgspec.Struct, frozen=True):
    """Whether the dialer may read, and what the descriptors stand for. nonce: what slot 0 of the table holds."""

    status: DataStatus
    message: str = ""
    nonce: int = 0
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    block_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
