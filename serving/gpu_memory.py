"""The GPUs of this machine and their memory, as NVIDIA's driver reports them (NVML), in processes that do not load torch.

The driver has what files in /dev do not show: the instances of a GPU that is divided (MIG), and the GPUs of WSL2.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

READ_SECONDS = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of a divided one. uuid: its name for CUDA, "GPU-…" or "MIG-…"."""

    uuid: str
    num_bytes: int


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one or more GPUs together. num_used_bytes: by all processes, the driver's own part included."""

    num_used_bytes: int
    num_bytes: int


class GpuMemoryReader:
    """Reads the memory of some GPUs from time to time. memory: the last reading; None: none, or they do not report it.

    uuids: of GPUs or of instances. library: ``pynvml``, by default.
    """

    def __init__(self, uuids: Sequence[str], library: Any = None) -> None:
        self._uuids = uuids
        self._library = library
        self.memory: GpuMemory | None = None

    async def keep_read(self, seconds: float = READ_SECONDS) -> None:
        """Read again and again, in another thread: a driver may take its time. Returns at once without a GPU."""
        while self._uuids:
            self.memory = await asyncio.to_thread(self.read)
            await asyncio.sleep(seconds)

    def read(self) -> GpuMemory | None:
        """Return the memory of all of them together; None if there is none, no driver, or one does not report its own."""
        return _ask_library(self._library, self._found) if self._uuids else None

    def _found(self, library: Any) -> GpuMemory:
        handles = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in self._uuids]
        found = [library.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return GpuMemory(sum(int(each.used) for each in found), sum(int(each.total) for each in found))


def reader_of(device: str, num_gpus: int, visible: str | None, library: Any = None) -> GpuMemoryReader:
    """Return the reader for ``num_gpus`` GPUs from a device on, "cuda:N"; of none for another kind of device.

    visible: see ``visible_gpus_of``.
    """
    kind, _, index = device.partition(":")
    gpus = (visible_gpus_of(visible, library) or []) if kind == "cuda" else []
    first = int(index or 0)
    return GpuMemoryReader([gpu.uuid for gpu in gpus[first : first + num_gpus]], library)


def visible_gpus_of(visible: str | None, library: Any = None) -> list[Gpu] | None:
    """Return what workers may use, in CUDA's order; None if there is no driver.

    visible: CUDA_VISIBLE_DEVICES: numbers, UUIDs, or beginnings of them; CUDA ignores the rest behind one that is not
    there. It shows a process one instance of divided GPUs at most, and that only if there is no whole GPU or it is named.
    library: ``pynvml``, by default.
    """
    found = _ask_library(library, _all_gpus)
    if found is None:
        return None
    whole, instances = found
    if visible is None:
        return [gpu for gpu in whole if gpu is not None] or instances[:1]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    chosen = list[Gpu]()
    for name in names:
        gpu = _named(name, whole, instances)
        if gpu is None:
            break
        # CUDA shows one instance only.
        if gpu in instances:
            return [gpu]
        chosen.append(gpu)
    return chosen


def gpu_memory(visible: str | None, library: Any = None) -> list[int] | None:
    """Return the bytes of each GPU that workers may use, in CUDA's order; None if they are unknown."""
    gpus = visible_gpus_of(visible, library)
    return None if gpus is None else [gpu.num_bytes for gpu in gpus]


def _ask_library(library: Any, question: Callable[[Any], T]) -> T | None:
    """Return the answer of the driver's library; None without a driver, or if it fails: a GPU fell off the bus, for example.

    library: None: ``pynvml``.
    """
    library = library or import_module("pynvml")
    try:
        library.nvmlInit()
    except library.NVMLError:
        return None
    try:
        return question(library)
    except library.NVMLError:
        return None
    finally:
        library.nvmlShutdown()


def _all_gpus(library: Any) -> tuple[list[Gpu | None], list[Gpu]]:
    """Return the GPUs by their numbers (None: a divided one), and the instances of divided ones."""
    whole: list[Gpu | None] = []
    instances: list[Gpu] = []
    for number in range(library.nvmlDeviceGetCount()):
        handle = library.nvmlDeviceGetHandleByIndex(number)
        if _is_divided(library, handle):
            whole.append(None)
            for place in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
                with suppress(library.NVMLError):  # a place without an instance
                    instance = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                    instances.append(_gpu(library, instance))
        else:
            whole.append(_gpu(library, handle))
    return whole, instances


def _is_divided(library: Any, handle: Any) -> bool:
    try:
        current, _ = library.nvmlDeviceGetMigMode(handle)
    except library.NVMLError:  # a GPU that cannot be divided
        return False
    return bool(current)


def _gpu(library: Any, handle: Any) -> Gpu:
    return Gpu(str(library.nvmlDeviceGetUUID(handle)), int(library.nvmlDeviceGetMemoryInfo(handle).total))


def _named(name: str, whole: list[Gpu | None], instances: list[Gpu]) -> Gpu | None:
    """Return the GPU of a number, a UUID, or the beginning of a UUID that only one has; None if there is none."""
    if name.isdigit():
        return whole[int(name)] if int(name) < len(whole) else None
    if not name.startswith(("GPU-", "MIG-")):
        return None
    found = [gpu for gpu in [*whole, *instances] if gpu is not None and gpu.uuid.startswith(name)]
    return found[0] if len(found) == 1 else None
