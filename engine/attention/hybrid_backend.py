"""FlashInfer for steps with chunks of prompts, our Triton kernels for steps of decodes: each is faster there.

Both read one layout of the pool and store KV by the same Triton kernel, so any step may follow any other.
"""

import torch

from engine.attention.backend import PlannedStep, StaticDecode, StoreKV
from engine.attention.flashinfer_backend import FlashInferBackend
from engine.attention.triton_backend import TritonBackend
from engine.compute.inputs import PreparedInputs


class HybridBackend:
    """Owns one backend for each kind of step; a decode beside a chunk is computed by the chunk's."""

    def __init__(self) -> None:
        self._prefill = FlashInferBackend()
        self._decode = TritonBackend()

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> PlannedStep:
        """See AttentionBackend."""
        chosen = self._decode if inputs.max_query_len == 1 else self._prefill
        return chosen.plan(inputs, block_size, device)

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticDecode:
        """See AttentionBackend. Static steps are decodes."""
        return self._decode.plan_static(num_reqs, max_blocks, block_size, device)

    def static_store(self) -> StoreKV:
        """See AttentionBackend."""
        return self._decode.static_store()
