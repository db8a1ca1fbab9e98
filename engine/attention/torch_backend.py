"""The reference backend in plain torch, on any device: every other backend is tested against it.

Rows with several tokens (prefill) run one by one. Rows with a single token (decode) run together in groups of similar
length, so that a large batch is no Python loop over requests.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.backend import LayerShape, Slots, StaticDecode, StoreKV
from engine.compute.inputs import PreparedInputs


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
        self._slots = SlotWriter(inputs, device)
        is_decode = inputs.num_scheduled_tokens == 1
        self._prefill_rows = [
            PrefillRow(inputs, row, block_size, device) for row in np.flatnonzero(~is_decode).tolist()
        ]
        self._decode_groups = [
            DecodeGroup(inputs, rows, block_size, device)
            for rows in _groups_of_like_length(inputs, np.flatnonzero(is_decode), block_size)
        ]

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        keys, values = cache.unbind(1)
        self._slots.write(keys, key)
        self._slots.write(values, value)

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
    ) -> Tensor:
        """See AttentionStep."""
        output = torch.empty_like(query)
        if cache is None:
            assert key is not None
            assert value is not None
            return self._attend_in_batch(shape, query, key, value, output)
        self.attend_into(shape, query, cache, output)
        return output

    def attend_into(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """See PlannedStep."""
        for row in self._prefill_rows:
            row.attend(shape, query, cache, output)
        for group in self._decode_groups:
            group.attend(shape, query, cache, output)

    def _attend_in_batch(
        self, shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, output: Tensor
    ) -> Tensor:
        for row in self._prefill_rows:
            own = row.tokens
            row.mix(shape, query[own], key[own].transpose(0, 1), value[own].transpose(0, 1), output[own])
        for group in self._decode_groups:
            own_value = value[group.tokens]
            output[group.tokens] = own_value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return output


class SlotWriter:
    """Writes the step's keys or values into their slots.

    A block is cleared before its first slot is written. So an earlier owner's content (perhaps NaN) is never gathered beside
    the new tokens, and never leaves the process in a partly filled block.
    """

    def __init__(self, inputs: PreparedInputs, device: torch.device) -> None:
        is_first = inputs.block_offsets == 0
        self._fresh = _to_device(np.unique(inputs.block_numbers[is_first]), device)
        self._blocks = _to_device(inputs.block_numbers, device)
        self._offsets = _to_device(inputs.block_offsets, device)

    def write(self, pool: Tensor, states: Tensor) -> None:
        """Write ``[num_tokens, num_kv_heads, head_dim]`` into ``[num_blocks, num_kv_heads, block_size, head_dim]``."""
        pool[self._fresh] = 0
        pool[self._blocks, :, self._offsets] = states


class PrefillRow:
    """A request with several tokens in this step."""

    def __init__(self, inputs: PreparedInputs, row: int, block_size: int, device: torch.device) -> None:
        start, end = inputs.query_start_loc[row : row + 2].tolist()
        self.tokens = slice(start, end)
        self._seq_len = int(inputs.seq_lens[row])
        num_blocks = -(-self._seq_len // block_size)
        self._blocks = _to_device(inputs.block_table[row, :num_blocks], device)
        self._positions = _to_device(inputs.positions[start:end], device)
        self._is_whole = end - start == self._seq_len
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """Gather the whole sequence (this step's tokens included) and fill this request's rows of ``output``."""
        key, value = (states[0, :, : self._seq_len] for states in _gather(cache, self._blocks[None]))
        self.mix(shape, query[self.tokens], key, value, output[self.tokens])

    def mix(self, shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Attend: query ``[tokens, heads, head_dim]`` over key and value ``[kv_heads, seq_len, head_dim]``."""
        mask = self._mask(shape.sliding_window)
        mixed = _mixed(shape, query.transpose(0, 1)[None], key[None], value[None], mask)
        output.copy_(mixed[0].transpose(0, 1))

    def _mask(self, window: int | None) -> Tensor | None:
        """Return ``[tokens, seq_len]``, True where a token is visible; None for the causal square. Made once per step."""
        if window is not None and window >= self._seq_len:
            window = None
        if window is None and self._is_whole:
            return None
        if window not in self._masks:
            all_positions = torch.arange(self._seq_len, device=self._positions.device)
            self._masks[window] = _visible(all_positions, self._positions[:, None], window)
        return self._masks[window]


class DecodeGroup:
    """Requests with one token each and sequences of similar length, attended in one call.

    Shorter tables are padded with the null block, which holds zeros.
    """

    def __init__(
        self, inputs: PreparedInputs, rows: NDArray[np.int64], block_size: int, device: torch.device
    ) -> None:
        own_blocks = -(-inputs.seq_lens[rows] // block_size)
        num_blocks = int(own_blocks.max())
        is_own = np.arange(num_blocks) < own_blocks[:, None]
        self.tokens = _to_device(inputs.query_start_loc[rows], device)
        self._table = _to_device(np.where(is_own, inputs.block_table[rows, :num_blocks], 0), device)
        self._positions = _to_device(inputs.seq_lens[rows] - 1, device)
        self._slots = torch.arange(num_blocks * block_size, device=device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """Gather every request's blocks, padded to the longest one, and fill their rows of ``output``."""
        key, value = _gather(cache, self._table)
        if shape.sliding_window not in self._masks:
            visible = _visible(self._slots, self._positions[:, None], shape.sliding_window)
            self._masks[shape.sliding_window] = visible[:, None, None, :]
        mixed = _mixed(shape, query[self.tokens][:, :, None], key, value, self._masks[shape.sliding_window])
        output[self.tokens] = mixed[:, :, 0]


def _mixed(shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend over ``[batch, heads, tokens, head_dim]``; mask as in ``PrefillRow``, None is the causal square."""
    if shape.softcap is not None:
        return _mixed_with_softcap(shape.scale, shape.softcap, query, key, value, mask)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _mixed_with_softcap(
    scale: float, softcap: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Attend in the order of transformers' eager attention; torch's has no soft cap."""
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, dim=1)
    value = value.repeat_interleave(group, dim=1)
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1, dtype=torch.float32)
    return weights.to(query.dtype) @ value


def _gather(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values ``[num_tables, num_kv_heads, num_blocks * block_size, head_dim]``.

    tables: ``[num_tables, num_blocks]``. Whole blocks are gathered; indexing keys and values separately takes twice as long.
    """
    blocks = cache.index_select(0, tables.flatten()).view(*tables.shape, *cache.shape[1:])
    key, value = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return key, value


def _visible(keys: Tensor, queries: Tensor, window: int | None) -> Tensor:
    """Return True where a query sees a key: not a later one, and less than ``window`` tokens before it."""
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def _groups_of_like_length(
    inputs: PreparedInputs, rows: NDArray[np.int64], block_size: int
) -> list[NDArray[np.int64]]:
    """Split rows by the power of two above their number of blocks: padding at most doubles the work."""
    sizes = np.ceil(np.log2(-(-inputs.seq_lens[rows] // block_size))).astype(int)
    return [rows[sizes == size] for size in np.unique(sizes).tolist()]


def _to_device(values: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
