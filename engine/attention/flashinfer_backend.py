"""Paged attention by FlashInfer (Ye et al. 2025); the pool's layers have its HND layout.

A step of decodes only runs the decode kernel, any other step the prefill kernel for all requests. On Hopper that is
FlashAttention-3's, which does not divide a long context among its programs; a step with nothing but short chunks, some of
them behind a long context, takes FlashAttention-2's, which does. A plan depends on the heads, so it is made when the first
layer of a kind attends. Our Triton kernel stores KV, because it clears fresh blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flashinfer
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Needs, Slots, StoreKV
from engine.attention.pages import NO_SLOT, Pages, num_cleared_behind, pages_of
from engine.attention.planning import PlannedWrapper
from engine.attention.splits import SHORT_CHUNK, is_split
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_paged import store_kv
from engine.compute.inputs import PreparedInputs
from engine.compute.profiling import profile_inputs
from engine.compute.staging import copy_into, on_device, padded
from engine.kv_cache.memory import TORCH_DTYPES

_WORKSPACE_BYTES = 256 * 2**20
# Query heads per KV head for which the decode kernel is taken; others run on tensor cores (it has none for 5, 6 and 7).
_DECODE_GROUPS = (1, 2, 3, 4)
_PREFILL_BACKENDS = {"prefill": "auto", "short": "fa2"}
_LAYOUT = "HND"
_TRIAL_BLOCK = 16


class FlashInferBackend:
    """Owns FlashInfer's wrappers with their workspaces, and plans them for every step."""

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, Tensor] = {}
        self._shared_pages: list[Tensor] = []
        self._wrappers: dict[tuple[str, LayerShape, int], PlannedWrapper] = {}

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> "FlashInferStep":
        """See AttentionBackend."""
        return FlashInferStep(inputs, block_size, device, self.wrapper)

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> "FlashInferDecode":
        """See AttentionBackend."""
        if not self._shared_pages:
            lengths = (num_reqs + 1, num_reqs * max_blocks, num_reqs)
            self._shared_pages = [torch.zeros(size, dtype=torch.int32, device=device) for size in lengths]
        return FlashInferDecode(num_reqs, max_blocks, block_size, self.workspace(device), self._shared_pages)

    def static_store(self) -> StoreKV:
        """See AttentionBackend."""
        return store_kv

    def workspace(self, device: torch.device) -> Tensor:
        """Return the bytes that all wrappers of the device share; they run one after another."""
        if device not in self._workspaces:
            self._workspaces[device] = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[device]

    def wrapper(self, kind: str, shape: LayerShape, group: int, device: torch.device) -> PlannedWrapper:
        """Return the wrapper for layers of this shape. kind: decode, prefill, or short (chunks behind a long context)."""
        key = (kind, shape, group)
        if key not in self._wrappers:
            workspace = self.workspace(device)
            if kind == "decode":
                wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    workspace, _LAYOUT, use_tensor_cores=group not in _DECODE_GROUPS
                )
            else:
                wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    workspace, _LAYOUT, backend=_PREFILL_BACKENDS[kind]
                )
            self._wrappers[key] = _planned(wrapper)
        return self._wrappers[key]


class FlashInferStep:
    """One step; see AttentionStep."""

    def __init__(
        self,
        inputs: PreparedInputs,
        block_size: int,
        device: torch.device,
        wrapper: Callable[[str, LayerShape, int, torch.device], PlannedWrapper],
    ) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._wrapper = wrapper
        self.slots = Slots(*on_device([inputs.slot_mapping, num_cleared_behind(inputs, block_size)], device))
        self._planned: dict[LayerShape, PlannedWrapper] = {}

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        store_kv(key, value, cache, self.slots)

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
        output: Tensor | None = None,
    ) -> Tensor:
        """See PlannedStep."""
        if cache is None:
            step = TorchBackend().plan(self._inputs, self._block_size, query.device)
            return step.attend(shape, query, key, value, None)
        query = query.contiguous()
        if output is None:
            output = torch.empty_like(query)
        if shape not in self._planned:
            self._planned[shape] = self._plan(shape, query, cache)
        self._planned[shape].run(query, cache, output)
        return output

    def _plan(self, shape: LayerShape, query: Tensor, cache: Tensor) -> PlannedWrapper:
        group = query.shape[1] // cache.shape[2]
        pages = pages_of(self._inputs, self._block_size, self._inputs.num_reqs)
        if self._inputs.max_query_len == 1:
            wrapper = self._wrapper("decode", shape, group, query.device)
            plan_decode(wrapper, pages, shape, query, cache)
            return wrapper
        # By the step's lengths only: one plan holds all of its requests.
        has_split = self._inputs.max_query_len <= SHORT_CHUNK and is_split(self._inputs).any()
        wrapper = self._wrapper("short" if has_split else "prefill", shape, group, query.device)
        plan_prefill(wrapper, self._inputs, pages, shape, query, cache)
        return wrapper


class FlashInferDecode:
    """Steps of ``num_reqs`` requests with one token each, in tensors at fixed addresses; see StaticDecode.

    shared: the pages (starts, indices, tokens in the last one) that the steps of all sizes and kinds of layers share: each
    plan writes those of the step that is replayed next.
    """

    def __init__(
        self, num_reqs: int, max_blocks: int, block_size: int, workspace: Tensor, shared: Sequence[Tensor]
    ) -> None:
        self._num_reqs = num_reqs
        self._block_size = block_size
        self._workspace = workspace
        self._shared = shared
        empty = torch.zeros(num_reqs, dtype=torch.int32, device=workspace.device)
        self.slots = Slots(empty.clone().fill_(NO_SLOT), empty.clone())
        self._max_blocks = max_blocks
        ones = torch.ones(num_reqs, dtype=torch.int32)
        self._pages = Pages(torch.arange(num_reqs + 1, dtype=torch.int32), torch.zeros_like(ones), ones)
        self._planned: dict[LayerShape, tuple[PlannedWrapper, Tensor, Tensor]] = {}

    def refill(self, inputs: PreparedInputs) -> bool:
        """See StaticDecode. Plans every kind of layer that has attended, outside the graph."""
        vectors = [
            padded(inputs.slot_mapping, self._num_reqs, NO_SLOT),
            padded(num_cleared_behind(inputs, self._block_size), self._num_reqs),
        ]
        copy_into([self.slots.places, self.slots.num_cleared], vectors)
        self._pages = pages_of(inputs, self._block_size, self._num_reqs)
        for shape, (wrapper, query, cache) in self._planned.items():
            plan_decode(wrapper, self._pages, shape, query, cache)
        return True

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        store_kv(key, value, cache, self.slots)

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Tensor | None
    ) -> Tensor:
        """See AttentionStep. Each kind of layer must have attended once before a graph is captured."""
        assert cache is not None
        if shape not in self._planned:
            lengths = (self._num_reqs + 1, self._num_reqs * self._max_blocks, self._num_reqs)
            starts, indices, last = (whole[:size] for whole, size in zip(self._shared, lengths, strict=True))
            wrapper = _planned(
                flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    _LAYOUT,
                    use_cuda_graph=True,
                    use_tensor_cores=query.shape[1] // cache.shape[2] not in _DECODE_GROUPS,
                    paged_kv_indptr_buffer=starts,
                    paged_kv_indices_buffer=indices,
                    paged_kv_last_page_len_buffer=last,
                )
            )
            plan_decode(wrapper, self._pages, shape, query, cache)
            self._planned[shape] = (wrapper, query[:0].clone(), cache[:0].clone())
        return self._planned[shape][0].run(query.contiguous(), cache)


def try_out(device: torch.device, needs: Needs, has_decodes: bool) -> None:
    """Attend with tiny batches, as this model does: what cannot be loaded or compiled raises an exception here.

    has_decodes: by the decode kernel too.
    """
    backend = FlashInferBackend()
    dtype = TORCH_DTYPES[needs.dtype]
    cache = torch.zeros(1, 2, 1, _TRIAL_BLOCK, needs.head_dim, dtype=dtype, device=device)
    for window in needs.windows:
        shape = LayerShape(needs.head_dim**-0.5, window)
        for num_tokens in (2, 1) if has_decodes else (2,):  # by the prefill kernel, and by the decode kernel
            query = torch.zeros(num_tokens, needs.group, needs.head_dim, dtype=dtype, device=device)
            step = backend.plan(profile_inputs([num_tokens]), _TRIAL_BLOCK, device)
            step.attend(shape, query, query, query, cache).cpu()
        inputs = profile_inputs([2])
        query = torch.zeros(2, needs.group, needs.head_dim, dtype=dtype, device=device)
        wrapper = backend.wrapper("short", shape, needs.group, device)
        plan_prefill(wrapper, inputs, pages_of(inputs, _TRIAL_BLOCK, 1), shape, query, cache)
        wrapper.run(query, cache).cpu()


def plan_prefill(
    wrapper: PlannedWrapper,
    inputs: PreparedInputs,
    pages: Pages,
    shape: LayerShape,
    query: Tensor,
    cache: Tensor,
) -> None:
    """Plan requests of any number of tokens; only the heads and number formats of query and cache matter."""
    wrapper.plan(
        torch.from_numpy(inputs.query_start_loc),
        pages.starts,
        pages.indices,
        pages.last,
        *_plan_sizes(query, cache),
        causal=True,
        **_plan_options(shape, query, cache),
    )


def _planned(wrapper: Any) -> PlannedWrapper:
    cuda: Any = torch.cuda
    return PlannedWrapper(wrapper, cuda.Event())


def plan_decode(
    wrapper: PlannedWrapper, pages: Pages, shape: LayerShape, query: Tensor, cache: Tensor
) -> None:
    """Plan rows of one token each; only the heads and number formats of query and cache matter."""
    wrapper.plan(
        pages.starts,
        pages.indices,
        pages.last,
        *_plan_sizes(query, cache),
        **_plan_options(shape, query, cache),
    )


def _plan_sizes(query: Tensor, cache: Tensor) -> tuple[int, int, int, int]:
    """Return the heads of query and cache, the size of a head, and the tokens of a page."""
    return query.shape[1], cache.shape[2], query.shape[2], cache.shape[3]


def _plan_options(shape: LayerShape, query: Tensor, cache: Tensor) -> dict[str, Any]:
    """Return the keyword arguments of a plan; window_left counts the tokens before the current one."""
    return {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": shape.scale,
        "logits_soft_cap": shape.softcap,
        "q_data_type": query.dtype,
        "kv_data_type": cache.dtype,
    }
