"""Counts of the collectives of ranks, for tests and trials: how many of each kind a step makes, and of how many bytes."""

from collections import Counter

import torch
from torch import Tensor

from engine.distributed.group import RankGroup


class CountedGroup:
    """A RankGroup that counts what one rank passes to another group: calls and bytes by kind. Calls without rows are free.

    The kinds are "sum", "highest", "gather" and "share".
    """

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.num_calls = Counter[str]()
        self.num_bytes = Counter[str]()

    @property
    def rank(self) -> int:
        """See RankGroup."""
        return self._group.rank

    @property
    def size(self) -> int:
        """See RankGroup."""
        return self._group.size

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        return self._group.add_up(self._counted("sum", part))

    def highest(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return self._group.highest(self._counted("highest", values))

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """See RankGroup."""
        return self._group.gather_columns(self._counted("gather", part), num_columns)

    def share(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return self._group.share(self._counted("share", values))

    def check_dtype(self, dtype: torch.dtype) -> None:
        """See RankGroup."""
        self._group.check_dtype(dtype)

    def close(self) -> None:
        """See RankGroup."""
        self._group.close()

    def clear(self) -> None:
        """Begin to count anew."""
        self.num_calls.clear()
        self.num_bytes.clear()

    def _counted(self, kind: str, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self.num_calls[kind] += 1
            self.num_bytes[kind] += tensor.nbytes
        return tensor
