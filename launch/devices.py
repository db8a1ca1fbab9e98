"""Places the workers of one machine on its GPUs, and counts how many of them share a GPU's memory."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from contract.errors import SettingError
from contract.identity import Role
from launch.gpu_memory import visible_gpus_of


@dataclass(frozen=True)
class DevicePlace:
    """One worker's place. device: its setting; None: what all workers are given. num_sharing: workers on its fullest GPU."""

    device: str | None
    num_sharing: int


def num_gpus(visible: str | None, library: Any = None, has_cpu_build: bool | None = None) -> int:
    """Return the number of NVIDIA GPUs that this machine's workers may use, without loading torch.

    visible: CUDA_VISIBLE_DEVICES. library: see ``visible_gpus_of``. has_cpu_build: torch is built for the CPU, which can use
    none; None: as it is installed.
    """
    if _has_cpu_build() if has_cpu_build is None else has_cpu_build:
        return 0
    return len(visible_gpus_of(visible, library) or [])


def _has_cpu_build() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def parse_devices(text: str) -> list[int]:
    """Return the numbers in a list of numbers and ranges, as "0,2-4". Raises ValueError."""
    numbers = list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if match is None:
            raise ValueError("it must be a list of GPU numbers and ranges, as 0,2-4")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"the range {part.strip()} ends before it begins")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        raise ValueError("it names a GPU twice")
    return numbers


def place_workers(
    pools: Mapping[Role, int],
    given: Mapping[Role, Sequence[int] | None],
    num_devices: int,
    num_ranks: Mapping[Role, int],
) -> dict[Role, list[DevicePlace]]:
    """Return each worker's place. Workers without a list are spread evenly over all GPUs, and those with one over theirs.

    num_ranks: GPUs of each worker of a role, which are side by side. Without several GPUs, and without a list, nothing is
    placed. Raises SettingError for a list with a GPU that is not there, or without enough GPUs side by side.
    """
    num_workers = sum(pools.values())
    if num_devices < 2 and not any(given.values()):
        return {role: [DevicePlace(None, num_workers)] * count for role, count in pools.items()}
    taken = 0
    starts: dict[Role, list[int]] = {}
    for role, count in pools.items():
        own = given.get(role)
        if own is not None:
            groups = _groups_of(role, own, num_devices, num_ranks[role])
            if not groups and count:
                raise _too_few(f"{role.value}_devices", num_ranks[role], f"it lists {len(own)}")
            starts[role] = [groups[index % len(groups)] for index in range(count)]
            continue
        if count and num_ranks[role] > num_devices:
            raise _too_few("tensor_parallel_size", num_ranks[role], f"this machine has {num_devices}")
        starts[role] = []
        for _ in range(count):
            first = _next_group(taken, num_ranks[role], num_devices)
            taken = first + num_ranks[role]
            starts[role].append(first)
    users = Counter(
        first + rank for role, firsts in starts.items() for first in firsts for rank in range(num_ranks[role])
    )
    return {
        role: [
            DevicePlace(f"cuda:{first}", max(users[first + rank] for rank in range(num_ranks[role])))
            for first in firsts
        ]
        for role, firsts in starts.items()
    }


def _next_group(taken: int, size: int, num_devices: int) -> int:
    """Return the first GPU of the next group of ``size`` behind those that are taken; behind the last, the first again."""
    first = -(-taken // size) * size
    return first if first + size <= num_devices else 0


def _groups_of(role: Role, own: Sequence[int], num_devices: int, size: int) -> list[int]:
    """Return the first GPU of each group of a role's own list. Raises SettingError for a GPU that is not there."""
    name = f"{role.value}_devices"
    if missing := [number for number in own if number >= num_devices]:
        raise SettingError(
            f"{name} has GPU {missing[0]}, and this machine has {num_devices} GPUs", param=name
        )
    return _groups(own, size)


def _groups(numbers: Sequence[int], size: int) -> list[int]:
    """Return the first GPU of each group of ``size`` that are side by side, without overlap."""
    firsts = list[int]()
    available = sorted(numbers)
    while available:
        first = available.pop(0)
        others = list(range(first + 1, first + size))
        if available[: size - 1] == others:
            firsts.append(first)
            del available[: size - 1]
    return firsts


def _too_few(name: str, num_ranks: int, found: str) -> SettingError:
    return SettingError(f"{name}: each worker needs {num_ranks} GPUs side by side, and {found}", param=name)
