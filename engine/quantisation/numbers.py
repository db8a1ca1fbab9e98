"""Arithmetic of stored numbers: words of several numbers, tables of four bits, and scales by group."""

import torch
from torch import Tensor

WORD_BITS = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of FP4 (OCP MX v1.0, 5.3.3) without a sign; the fourth bit is the sign."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(words: Tensor, num_bits: int) -> Tensor:
    """Return the numbers in words of int32 along the last dimension, the lowest bits first; int32, from 0 on."""
    shifts = torch.arange(0, WORD_BITS, num_bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << num_bits) - 1)).flatten(-2)


def unpack_range(words: Tensor, num_bits: int, first: int, end: int) -> Tensor:
    """Return the numbers ``first`` to ``end`` of those along the last dimension; see ``unpack``."""
    in_word = WORD_BITS // num_bits
    start = first // in_word
    numbers = unpack(words[..., start : -(-end // in_word)], num_bits)
    return numbers[..., first - start * in_word : end - start * in_word]


def unpack_awq_rows(words: Tensor, first: int, end: int) -> Tensor:
    """Return numbers ``first`` to ``end`` along the last dimension as rows, ``[end - first, len(words)]``, in AWQ's order.

    A word has 0, 2, 4, 6, 1, 3, 5 and 7 of eight numbers of four bits, the lowest bits first.
    """
    start = first // 8
    columns = words[:, start : -(-end // 8)].t()
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32)
    numbers = ((columns[:, None] >> shifts[:, None]) & 0xF).flatten(0, 1)
    return numbers[first - start * 8 : end - start * 8]


def nibbles(stored: Tensor, *, is_high_first: bool) -> Tensor:
    """Return the two numbers of four bits of each byte along the last dimension, as int64 indices."""
    low = stored & 0xF
    high = stored >> 4
    pairs = (high, low) if is_high_first else (low, high)
    return torch.stack(pairs, dim=-1).flatten(-2).long()


def fp4(stored: Tensor) -> Tensor:
    """Return the numbers of FP4 (e2m1) in bytes, the lower half first; float32."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)))
    return table[nibbles(stored, is_high_first=False)]


def scaled(codes: Tensor, scale: Tensor, zero: Tensor | None, group: Tensor | None) -> Tensor:
    """Return ``(codes - zero) * scale``, float32 ``[num_rows, num_inputs]``.

    scale, zero: ``[num_rows, num_groups]``. group: the group of each input, ``[num_inputs]``; None: there is one group.
    """
    values = codes.float()
    if zero is not None:
        values = values - (zero if group is None else zero[:, group])
    return values * (scale if group is None else scale[:, group])


def group_of_input(num_inputs: int, size: int) -> Tensor:
    """Return the group of each input, ``[num_inputs]``, where neighbours form groups of ``size``."""
    return torch.arange(num_inputs) // size
