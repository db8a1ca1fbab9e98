"""The best token of each row of logits, where the logits are, on one rank or over the parts of several.

Several ranks exchange one whole number of each row instead of logits: a key, which is the logit in the order of whole
numbers, then the token, reversed. The highest key is that of the best token, and of the lowest id among equals, so the
exchange is one collective, in which the order of the ranks does not matter. The key of a row without columns is 0; all
others are higher.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.compute.staging import overlap_of
from engine.distributed.group import RankGroup

BestTokens = Callable[[Tensor, Tensor], None]
"""Logits ``[num_rows, vocab_size]``; writes into int64 ``[num_rows, 2]`` the best token, the lowest id among equals, and 1
if its logit is a number (NaN is best), else 0."""

TILE = 8192
NUM_WARPS = 8
MOST_PROGRAMS = 1024
"""Programs of a batch. They occupy a device; more would only add ends of rows, at which programs meet."""

_TOKEN_BITS = 31
_LOW_BITS = 0x7FFFFFFF
# The place of +infinity in the order of float32; NaN is one above it, and -infinity the opposite number, less one.
_INFINITY = 0x7F800000
# Makes keys positive.
_OFFSET = 0x80000001


class BestSearch(Protocol):
    """Finds best tokens, and keys of them; on a device, without a wait on the host. Calls are BestTokens."""

    def __call__(self, logits: Tensor, best: Tensor) -> None:
        """See BestTokens."""

    def find_keys(self, logits: Tensor, first_token: int, keys: Tensor) -> None:
        """Write the key of each row into ``keys``, int64 ``[num_rows]``; the first column is that of ``first_token``."""

    def read_keys(self, keys: Tensor, best: Tensor) -> None:
        """Write into ``best`` the tokens of the keys, as BestTokens does."""


class TorchBestTokens:
    """See BestSearch. Operations of torch, and of numpy on the host."""

    def __call__(self, logits: Tensor, best: Tensor) -> None:
        """See BestTokens."""
        find_by_torch(logits, best)

    def find_keys(self, logits: Tensor, first_token: int, keys: Tensor) -> None:
        """See BestSearch."""
        values, tokens = _top(logits)
        bits = (values + 0.0).view(torch.int32).to(torch.int64)  # both zeros are equal
        order = torch.where(bits < 0, bits ^ _LOW_BITS, bits)
        order = torch.where(values.isnan(), _INFINITY + 1, order)
        keys.copy_((order + _OFFSET) << _TOKEN_BITS | (_LOW_BITS - first_token) - tokens)

    def read_keys(self, keys: Tensor, best: Tensor) -> None:
        """See BestSearch."""
        order = (keys >> _TOKEN_BITS) - _OFFSET
        best[:, 0].copy_(_LOW_BITS - (keys & _LOW_BITS))
        best[:, 1].copy_((order < _INFINITY) & (order > -_INFINITY - 1))


def find_by_torch(logits: Tensor, best: Tensor) -> None:
    """See BestTokens."""
    values, tokens = _top(logits)
    best[:, 0].copy_(tokens)
    best[:, 1].copy_(values.isfinite())


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's highest logit in float32 and its column, the lowest among equals; NaN is highest."""
    if logits.device.type == "cpu":  # numpy is ten times as fast
        wide = logits.to(torch.float32)
        found = torch.from_numpy(wide.numpy().argmax(axis=-1))
        return wide.gather(1, found[:, None])[:, 0], found
    top = logits.max(dim=-1)
    return top.values.to(torch.float32), top.indices


class TritonBestTokens:
    """See BestSearch. One kernel reads the logits once, and one the keys.

    For calls that are captured, one with the most rows comes before.
    """

    def __init__(self, most_programs: int = MOST_PROGRAMS) -> None:
        self._most_programs = most_programs
        self._keys: Tensor | None = None
        self._counters: Tensor | None = None

    def __call__(self, logits: Tensor, best: Tensor) -> None:
        """See BestTokens."""
        self._launch(logits, 0, best, finds_keys=False)

    def find_keys(self, logits: Tensor, first_token: int, keys: Tensor) -> None:
        """See BestSearch."""
        self._launch(logits, first_token, keys, finds_keys=True)

    def read_keys(self, keys: Tensor, best: Tensor) -> None:
        """See BestSearch."""
        from engine.compute.triton_kernels import KEYS_AT_ONCE, tokens_kernel

        tokens_kernel[-(-len(keys) // KEYS_AT_ONCE),](
            keys, best, len(keys), tile=KEYS_AT_ONCE, **overlap_of(keys.device)
        )

    def _launch(self, logits: Tensor, first_token: int, found: Tensor, *, finds_keys: bool) -> None:
        from engine.compute.triton_kernels import best_kernel

        num_rows, size = logits.shape
        if self._keys is None or self._counters is None or len(self._keys) < num_rows:
            self._keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
            self._counters = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        num_parts = min(-(-size // TILE), max(1, self._most_programs // num_rows))
        best_kernel[num_parts, num_rows](
            logits,
            self._keys,
            self._counters,
            found,
            logits.stride(0),
            size,
            first_token,
            tile=TILE,
            finds_keys=finds_keys,
            num_warps=NUM_WARPS,
            **overlap_of(logits.device),
        )


class BestOfRanks:
    """See BestTokens, for logits of which each rank has equal numbers of columns, with padding behind the vocabulary.

    One collective, of 8 bytes a row. Every rank calls it, and has the same tokens.
    """

    def __init__(self, group: RankGroup, vocab_size: int, search: BestSearch) -> None:
        self._group = group
        self._vocab_size = vocab_size
        self._search = search

    def __call__(self, logits: Tensor, best: Tensor) -> None:
        """See BestTokens. logits: this rank's columns."""
        num_rows, width = logits.shape
        first = self._group.rank * width
        own = logits[:, : max(0, self._vocab_size - first)]
        keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
        if own.shape[1]:
            self._search.find_keys(own, first, keys)
        self._search.read_keys(self._group.highest(keys), best)


def best_of_ranks(group: RankGroup, vocab_size: int, search: BestSearch) -> BestTokens:
    """Return the search over what all ranks have; one rank has everything."""
    return search if group.size == 1 else BestOfRanks(group, vocab_size, search)
