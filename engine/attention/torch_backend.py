"""The reference backend in plain torch, on any device: every other backend is tested against it.

Rows with several tokens (prefill) run one by one. Rows with a single token (decode) run together in groups of similar
length, so that a large batch is no Python loop over requests. The cache may have another dtype than the model: KV is
rounded when it is stored, and converted to the queries' dtype when it is gathered, so every token is seen as it is stored.
"""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import LayerShape, Slots, StaticDecode, StoreKV
from engine.compute.inputs import PreparedInputs

# Indices of tensors are int64.
_to_device = partial(torch.as_tensor, dtype=torch.int64)


class TorchBackend:
    """Gathers a request's blocks into one tensor and calls torch's attention on it."""

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> "TorchStep":
        """See AttentionBackend."""
        return TorchStep(inputs, block_size, device)

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticDecode | None:
        """See AttentionBackend. Return None: the calls of a step depend on the lengths."""
        return None

    def static_store(self) -> StoreKV | None:
        """See AttentionBackend. Return None, as for ``plan_static``."""
        return None


class TorchStep:
    """One step's plan: the slots to write, the fresh blocks, and the two kinds of rows."""

    slots: Slots | None = None

    def __init__(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> None:
        is_first = inputs.block_offsets == 0
        self._fresh = _to_device(np.unique(inputs.block_numbers[is_first]), device=device)
        self._blocks = _to_device(inputs.block_numbers, device=device)
        self._offsets = _to_device(inputs.block_offsets, device=device)
        is_decode = inputs.num_scheduled_tokens == 1
        decodes = np.flatnonzero(is_decode)
        # By the power of two above their number of blocks: padding at most doubles the work.
        sizes = np.ceil(np.log2(-(-inputs.seq_lens[decodes] // block_size))).astype(int)
        self._prefill_rows: list[PrefillRow] = []
        for row in np.flatnonzero(~is_decode).tolist():
            self._prefill_rows.append(PrefillRow(inputs, row, block_size, device))
        self._decode_groups: list[DecodeGroup] = []
        for size in np.unique(sizes).tolist():
            self._decode_groups.append(DecodeGroup(inputs, decodes[sizes == size], block_size, device))

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        # A block is cleared before its first slot is written. So an earlier owner's content (perhaps NaN) is never gathered
        # beside the new tokens, and never leaves the process in a partly filled block.
        cache[self._fresh] = 0
        for part, states in zip(cache.unbind(1), (key, value), strict=False):
            part[self._blocks, :, self._offsets] = states.to(cache.dtype)

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
        if output is None:
            output = torch.empty_like(query)
        if cache is None:
            assert key is not None
            assert value is not None
            for row in self._prefill_rows:
                own = row.tokens
                row.mix(shape, query[own], key[own].transpose(0, 1), value[own].transpose(0, 1), output[own])
            for group in self._decode_groups:  # a token that is alone sees itself only
                own_query, own_key, own_value = (
                    states[group.tokens][:, :, None] for states in (query, key, value)
                )
                output[group.tokens] = _attend(shape, own_query, own_key, own_value, None)[:, :, 0]
            return output
        all_rows: list[PrefillRow | DecodeGroup] = [*self._prefill_rows, *self._decode_groups]
        for rows in all_rows:
            # Whole blocks: indexing keys and values separately takes twice as long.
            blocks = cache.index_select(0, rows.table.flatten()).view(*rows.table.shape, *cache.shape[1:])
            parts = blocks.to(query.dtype).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            rows.attend(shape, query, parts[0], parts[-1], output)
        return output


class PrefillRow:
    """A request with several tokens in this step. table: its blocks, ``[1, num_blocks]``."""

    def __init__(self, inputs: PreparedInputs, row: int, block_size: int, device: torch.device) -> None:
        start, end = inputs.query_start_loc[row : row + 2].tolist()
        self.tokens = slice(start, end)
        self._seq_len = int(inputs.seq_lens[row])
        num_blocks = -(-self._seq_len // block_size)
        self.table = _to_device(inputs.block_table[row : row + 1, :num_blocks], device=device)
        self._positions = _to_device(inputs.positions[start:end], device=device)
        self._is_whole = end - start == self._seq_len
        self._masks: dict[_Reach, Tensor | None] = {}

    def attend(self, shape: LayerShape, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """Fill this request's rows of ``output``. keys, values: of its table's blocks, with this step's tokens."""
        own = (0, slice(None), slice(self._seq_len))
        self.mix(shape, query[self.tokens], keys[own], values[own], output[self.tokens])

    def mix(self, shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Attend: query ``[tokens, heads, head_dim]`` over key and value ``[kv_heads, seq_len, head_dim]``."""
        mask = self._mask((shape.sliding_window, shape.chunk_size))
        mixed = _attend(shape, query.transpose(0, 1)[None], key[None], value[None], mask)
        output.copy_(mixed[0].transpose(0, 1))

    def _mask(self, reach: "_Reach") -> Tensor | None:
        """Return ``[tokens, seq_len]``, True where a token is visible; None for the causal square. Made once per step."""
        if self._is_whole and all(limit is None or limit >= self._seq_len for limit in reach):
            return None
        if reach not in self._masks:
            all_positions = torch.arange(self._seq_len, device=self._positions.device)
            self._masks[reach] = _visible(all_positions, self._positions[:, None], reach)
        return self._masks[reach]


class DecodeGroup:
    """Requests with one token each and sequences of similar length, attended in one call.

    table: their blocks, ``[num_requests, num_blocks]``; shorter ones are padded with the null block, which holds zeros.
    """

    def __init__(
        self, inputs: PreparedInputs, rows: NDArray[np.int64], block_size: int, device: torch.device
    ) -> None:
        own_blocks = -(-inputs.seq_lens[rows] // block_size)
        num_blocks = int(own_blocks.max())
        is_own = np.arange(num_blocks) < own_blocks[:, None]
        self.tokens = _to_device(inputs.query_start_loc[rows], device=device)
        self.table = _to_device(np.where(is_own, inputs.block_table[rows, :num_blocks], 0), device=device)
        self._positions = _to_device(inputs.seq_lens[rows] - 1, device=device)
        self._slots = torch.arange(num_blocks * block_size, device=device)
        self._masks: dict[_Reach, Tensor] = {}

    def attend(self, shape: LayerShape, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """Fill these requests' rows of ``output``. keys, values: of the table's blocks, with this step's tokens."""
        reach = (shape.sliding_window, shape.chunk_size)
        if reach not in self._masks:
            self._masks[reach] = _visible(self._slots, self._positions[:, None], reach)[:, None, None, :]
        mixed = _attend(shape, query[self.tokens][:, :, None], keys, values, self._masks[reach])
        output[self.tokens] = mixed[:, :, 0]


def _attend(shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend over ``[batch, heads, tokens, head_dim]``; mask as in ``PrefillRow``, None is the causal square."""
    group = query.shape[1] // key.shape[1]
    if shape.softcap is None and shape.sinks is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=shape.scale,
            enable_gqa=group > 1,
        )
    # In the order of transformers' eager attention; torch's has neither soft caps nor sinks.
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = query @ key.transpose(2, 3) * shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if shape.sinks is not None:
        sinks = shape.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(query.dtype) @ value


_Reach = tuple[int | None, int | None]
"""A layer's window and chunk size, in tokens."""


def _visible(keys: Tensor, queries: Tensor, reach: _Reach) -> Tensor:
    """Return True where a query sees a key: not a later one, less than a window before it, and in the same chunk."""
    window, chunk_size = reach
    visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window)
    if chunk_size is not None:
        visible = visible & (keys // chunk_size == queries // chunk_size)
    return visible
