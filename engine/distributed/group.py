"""What the ranks of one engine do together inside a forward pass, and which part of a tensor is whose."""

from typing import Protocol

import torch
from torch import Tensor

from contract.errors import SettingError
from engine.compute.device import resolve_device


class RankGroup(Protocol):
    """The tensor-parallel group, seen from one rank. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Which of the ranks this one is, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, on every rank; ``part`` is overwritten."""

    def gather_columns(self, part: Tensor) -> Tensor:
        """On rank 0 all ranks' ``[num_rows, num_columns / size]`` side by side; the other ranks get their own part."""

    def share_tokens(self, token_ids: list[int | None]) -> list[int | None]:
        """What rank 0 gave, on every rank; all give lists of the same length."""

    def close(self) -> None:
        """Leave the group."""


class SingleRank:
    """A group of one: nothing is sent anywhere."""

    rank = 0
    size = 1

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        return part

    def gather_columns(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        return part

    def share_tokens(self, token_ids: list[int | None]) -> list[int | None]:
        """See RankGroup."""
        return token_ids

    def close(self) -> None:
        """Nothing to leave."""


def rank_device(setting: str, num_cuda_devices: int, rank: int, size: int) -> torch.device:
    """The device of one of ``size`` ranks: rank i of a CUDA engine has the i-th device from the one in the setting on.

    Raises SettingError where the machine has fewer.
    """
    first = resolve_device(setting, num_cuda_devices)
    if first.type != "cuda":
        return first
    if first.index + size > num_cuda_devices:
        raise SettingError(
            f"tensor_parallel_size is {size}, and this machine has {num_cuda_devices} CUDA devices, the engine's "
            f"first is {first}; each rank needs one of its own",
            param="tensor_parallel_size",
        )
    return torch.device("cuda", first.index + rank)
