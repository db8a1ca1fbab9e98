"""An agent of bare NIXL with one registered pool of blocks, started as in the ``nixl`` transport."""

import os
import time
from typing import Any

import numpy as np
from torch import Tensor

from kv_transfer.transports.nixl.agent import load


class BareAgent:
    """An agent that can read, and be read by others. kind: the kind of memory of its pool, by NIXL's name."""

    def __init__(self, name: str, pool: Tensor) -> None:
        api = load("127.0.0.1").api
        config = api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self.agent: Any = api.nixl_agent(f"{name}-{os.getpid()}", config)
        self.agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self.kind = "VRAM" if pool.is_cuda else "DRAM"
        self.agent.register_memory([(pool.data_ptr(), pool.nbytes, 0, "")], self.kind)

    def blocks(self, whose: str, address: int, kind: str, shape: tuple[int, int]) -> Any:
        """Return the descriptors of all blocks of a pool, as one strided row. shape: number of blocks, bytes of each."""
        num_blocks, size = shape
        row = np.array([[address, size, 0, size, num_blocks]], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(whose, row, kind)

    def read(self, ours: Any, our_ids: Any, theirs: Any, their_ids: Any) -> float:
        """Read blocks of a peer into own ones; return the seconds. Raises AssertionError if it fails."""
        begin = time.perf_counter()
        handle = self.agent.make_prepped_xfer("READ", ours, our_ids, theirs, their_ids)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        seconds = time.perf_counter() - begin
        assert state == "DONE", state
        return seconds
