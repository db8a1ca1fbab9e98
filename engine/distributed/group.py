"""The collectives of an engine's ranks inside a forward pass, and each rank's device."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from contract.errors import SettingError

DEVICES = ("auto", "cpu", "cuda")


class RankGroup(Protocol):
    """The tensor-parallel group, seen from one rank. Every rank makes the same calls in the same order.

    On a device, calls with tensors neither wait on the host nor leave the current stream, so that a graph can capture them.
    """

    @property
    def rank(self) -> int:
        """The index of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def add_up(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, on every rank; ``part`` is overwritten."""

    def highest(self, values: Tensor) -> Tensor:
        """Return the highest of all ranks' int64 values, element by element, on every rank; ``values`` is overwritten."""

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """Return all ranks' parts side by side on rank 0, ``[num_rows, num_columns]``, and the own part elsewhere.

        Columns behind the ``num_columns``-th are padding, and left out.
        """

    def share(self, values: Tensor) -> Tensor:
        """Return rank 0's values on every rank; all pass contiguous tensors of one shape, which are overwritten."""

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise SettingError if parts of this dtype cannot be added up, before weights are read."""

    def close(self) -> None:
        """Leave the group."""


class SingleRank:
    """A group of one rank, which sends nothing."""

    rank = 0
    size = 1

    def add_up(self, part: Tensor) -> Tensor:
        """See RankGroup."""
        return part

    def highest(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return values

    def gather_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """See RankGroup."""
        return part

    def share(self, values: Tensor) -> Tensor:
        """See RankGroup."""
        return values

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Do nothing: nothing is added up."""

    def close(self) -> None:
        """Do nothing: there is no group to leave."""


def columns_of_all(parts: Sequence[Tensor], num_columns: int) -> Tensor:
    """Return the first ``num_columns`` columns of parts of equal width, contiguous."""
    width = parts[0].shape[-1]
    return torch.cat(
        [part[..., : max(0, num_columns - index * width)] for index, part in enumerate(parts)], dim=-1
    )


def rank_device(setting: str, num_cuda_devices: int, rank: int, size: int) -> torch.device:
    """Return the device of one of ``size`` ranks. Rank i of a CUDA engine has the i-th device, from the setting's device on.

    Raises SettingError if the machine has fewer.
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


def resolve_device(setting: str, num_cuda_devices: int, rocm: str | None = torch.version.hip) -> torch.device:
    """Return the device of this setting; "auto" is the first CUDA device if there is one, else the CPU.

    "cuda" means "cuda:0". Raises SettingError for an unknown or missing device, and for an AMD GPU.

    rocm: the version of ROCm that this build of torch is for, whose devices it calls CUDA devices as well.
    """
    kind, _, index = setting.partition(":")
    if kind not in DEVICES or (index and not (kind == "cuda" and index.isdigit())):
        raise SettingError(
            f"device is {setting!r}; choose one of {', '.join(DEVICES)}, or cuda:N", param="device"
        )
    if kind == "cpu" or (kind == "auto" and num_cuda_devices == 0):
        return torch.device("cpu")
    if rocm is not None:
        raise SettingError(
            f"device is {setting!r}, and this build of torch is for AMD GPUs (ROCm {rocm}), which are not supported: "
            "use device cpu, or a build of torch for CUDA",
            param="device",
        )
    if int(index or 0) >= num_cuda_devices:
        raise SettingError(
            f"device is {setting!r}, but this machine (or this build of torch) has {num_cuda_devices} CUDA devices; "
            "use cpu or auto",
            param="device",
        )
    return torch.device("cuda", int(index or 0))
