"""Places the workers of one machine on its GPUs, and counts how many of them share a GPU's memory."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from contract.errors import SettingError
from contract.identity import Role
from serving.gpu_memory import visible_gpus_of

logger = logging.getLogger(__name__)
_DEVICE_FILES = Path("/dev")
_WSL_DEVICE = "dxg"
"""All GPUs of WSL2 are behind this one file."""


class RankCounts(NamedTuple):
    """The ranks of a worker, or of a data-parallel group, which has one place as a worker has.

    data: of the group, each of which is ``tensor`` processes. On CUDA each process has a GPU.
    """

    data: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """The GPUs of the worker or group, which are side by side."""
        return self.data * self.tensor


@dataclass(frozen=True)
class DevicePlace:
    """One worker's place. device: its setting; None: what all workers are given. num_sharing: workers on its fullest GPU."""

    device: str | None
    num_sharing: int


def num_gpus(
    visible: str | None,
    library: Any = None,
    has_cpu_build: bool | None = None,
    device_files: Path = _DEVICE_FILES,
) -> int:
    """Return the number of NVIDIA GPUs that this machine's workers may use, without loading torch.

    visible: CUDA_VISIBLE_DEVICES. library: see ``visible_gpus_of``; without it the files of ``device_files`` are counted.
    has_cpu_build: torch is built for the CPU, which can use none; None: as it is installed.
    """
    if has_cpu_build is None:
        try:
            has_cpu_build = version("torch").endswith("+cpu")
        except PackageNotFoundError:
            has_cpu_build = True
    if has_cpu_build:
        return 0
    gpus = visible_gpus_of(visible, library)
    if gpus is not None:
        return len(gpus)
    counted = _count_files(visible, device_files)
    if counted:
        logger.warning(
            "NVIDIA's management library (NVML) does not answer; the files in %s show %d GPUs, of unknown memory",
            device_files,
            counted,
        )
    return counted


def _count_files(visible: str | None, folder: Path) -> int:
    """Return how many GPUs the files of the driver show. A UUID in ``visible`` cannot be checked, and counts as one.

    As for CUDA, what is behind a number without a GPU is ignored, and a process has one instance of a divided GPU at most.
    """
    num_files = len([path for path in folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    num_there = num_files or int((folder / _WSL_DEVICE).exists())
    if visible is None or not num_there:
        return num_there
    chosen = set[str]()
    for name in filter(None, map(str.strip, visible.split(","))):
        if name.startswith("MIG-"):  # CUDA shows one of them to a process, however many are listed
            return 1
        if not name.startswith("GPU-") and not (name.isdigit() and int(name) < num_there):
            break
        chosen.add(name)
    return min(len(chosen), num_there)


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
    ranks: Mapping[Role, RankCounts],
) -> dict[Role, list[DevicePlace]]:
    """Return each worker's place. Workers without a list are spread evenly over all GPUs, and those with one over theirs.

    ranks: of each worker of a role. Without several GPUs, and without a list, nothing is
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
            groups = _groups_of(role, own, num_devices, ranks[role].num_devices)
            if not groups and count:
                raise _too_few(f"{role.value}_devices", ranks[role], f"it lists {len(own)}")
            starts[role] = [groups[index % len(groups)] for index in range(count)]
            continue
        if count and ranks[role].num_devices > num_devices:
            name = "tensor_parallel_size" if ranks[role].data == 1 else "data_parallel_size"
            raise _too_few(name, ranks[role], f"this machine has {num_devices}")
        starts[role] = []
        for _ in range(count):
            # The next whole group behind those that are taken; behind the last one, the first again.
            size = ranks[role].num_devices
            first = -(-taken // size) * size
            first = first if first + size <= num_devices else 0
            taken = first + size
            starts[role].append(first)
    users = Counter(
        first + rank
        for role, firsts in starts.items()
        for first in firsts
        for rank in range(ranks[role].num_devices)
    )
    return {
        role: [
            DevicePlace(f"cuda:{first}", max(users[first + rank] for rank in range(ranks[role].num_devices)))
            for first in firsts
        ]
        for role, firsts in starts.items()
    }


def _groups_of(role: Role, own: Sequence[int], num_devices: int, size: int) -> list[int]:
    """Return the first GPU of each group of ``size`` in a role's list that are side by side, without overlap.

    Raises SettingError for a GPU that is not there.
    """
    name = f"{role.value}_devices"
    if missing := [number for number in own if number >= num_devices]:
        raise SettingError(
            f"{name} has GPU {missing[0]}, and this machine has {num_devices} GPUs", param=name
        )
    firsts = list[int]()
    available = sorted(own)
    while available:
        first = available.pop(0)
        others = list(range(first + 1, first + size))
        if available[: size - 1] == others:
            firsts.append(first)
            del available[: size - 1]
    return firsts


def _too_few(name: str, ranks: RankCounts, found: str) -> SettingError:
    unit = "worker" if ranks.data == 1 else f"group of {ranks.data} ranks"
    return SettingError(
        f"{name}: each {unit} needs {ranks.num_devices} GPUs side by side, and {found}", param=name
    )
