"""The memory that the KV cache may take. Measuring is a protocol, so that every formula runs on every machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from contract.errors import SettingError
from engine.kv_cache.shares import HOST_LIMIT_BYTES
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

_HOST_SHARE = 4
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryReading:
    """Memory in bytes. peak: the most that this process held on the device since ``start``, weights included.

    free: memory that is not in use, on a device beside the whole peak. Other processes, contexts and NCCL have taken theirs.
    is_host: the KV cache lives in host memory that other programs use too.
    """

    total_bytes: int
    free_bytes: int
    peak_bytes: int
    is_host: bool


class MemoryProbe(Protocol):
    """Measures the memory that the KV cache will live in."""

    def start(self) -> None:
        """Reset the peak."""

    def read(self) -> MemoryReading:
        """Measure the memory now."""


class HostProbe:
    """The host's memory, within the limit of the control group (containers) if there is one."""

    def __init__(self, cgroup: Path = _CGROUP) -> None:
        self._cgroup = cgroup

    def start(self) -> None:
        """Do nothing: the rule for the host has no peak in it."""

    def read(self) -> MemoryReading:
        """See MemoryProbe; ``peak_bytes`` is 0."""
        memory = psutil.virtual_memory()
        total = int(memory.total)
        free = int(memory.available)
        limit = self._number("memory.max")
        used = self._number("memory.current")
        if limit is not None and used is not None:
            total = min(total, limit)
            free = min(free, max(0, limit - used))
        return MemoryReading(total, free, 0, is_host=True)

    def _number(self, name: str) -> int | None:
        try:
            text = (self._cgroup / name).read_text().strip()
        except OSError:
            return None
        return int(text) if text.isdigit() else None


class CudaProbe:
    """The memory of one CUDA device; the peak is what torch's allocator had reserved. cuda: torch's functions for it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda

    def start(self) -> None:
        """See MemoryProbe."""
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        """See MemoryProbe."""
        free, total = self._cuda.mem_get_info(self._device)
        peak = self._cuda.max_memory_reserved(self._device)
        # What was reserved at the peak is needed again, though torch has given it back to the driver since.
        given_back = peak - self._cuda.memory_reserved(self._device)
        return MemoryReading(total, max(0, free - given_back), peak, is_host=False)


def available_kv_bytes(reading: MemoryReading, settings: EngineSettings) -> int:
    """Return the bytes for the KV cache of one rank.

    ``kv_cache_bytes`` wins. Host: min(1 GiB, a quarter of the free memory / workers on the host). Both are the whole
    worker's: its ranks share them evenly. Device (each rank has its own): total × utilisation / workers on that
    device − peak, and at most the free memory − reserve. Raises SettingError if nothing is left on the device, or less
    than ``kv_cache_bytes``.
    """
    if reading.is_host:
        share = reading.free_bytes // _HOST_SHARE // settings.workers_on_host
        found = min(HOST_LIMIT_BYTES, share) if settings.kv_cache_bytes is None else settings.kv_cache_bytes
        return found // settings.tensor_parallel_size
    if settings.kv_cache_bytes is not None:
        given = settings.kv_cache_bytes // settings.tensor_parallel_size
        if given > reading.free_bytes:
            raise SettingError(
                f"kv_cache_bytes is {given} bytes on each device, and {_held(reading)}; lower it, or leave it unset",
                param="kv_cache_bytes",
            )
        return given
    share = int(reading.total_bytes * settings.gpu_memory_utilization / settings.workers_on_host)
    of_share = share - reading.peak_bytes
    of_free = reading.free_bytes - settings.gpu_memory_reserve_bytes
    if min(of_share, of_free) <= 0:
        param = "gpu_memory_utilization" if of_share <= 0 else "gpu_memory_reserve_bytes"
        raise SettingError(
            f"no memory is left for the KV cache: gpu_memory_utilization {settings.gpu_memory_utilization} of "
            f"{reading.total_bytes} bytes over {settings.workers_on_host} workers is {share} bytes, and "
            f"{_held(reading)}, of which gpu_memory_reserve_bytes keeps {settings.gpu_memory_reserve_bytes}; "
            "change them, run fewer workers on this device, or end what else runs there",
            param=param,
        )
    if of_free < of_share:
        logger.warning(
            "the KV cache gets %d bytes, not the %d that gpu_memory_utilization allows: %s",
            of_free,
            of_share,
            _held(reading),
        )
    return min(of_share, of_free)


def _held(reading: MemoryReading) -> str:
    """Return in words who holds a device's memory."""
    others = reading.total_bytes - reading.free_bytes - reading.peak_bytes
    return (
        f"of the device's {reading.total_bytes} bytes the weights and a full step take {reading.peak_bytes}, contexts, "
        f"libraries and other processes {max(0, others)}, so {reading.free_bytes} are free"
    )


@contextmanager
def naming_memory(what: str, param: str) -> Iterator[None]:
    """Turn torch's error for a full device into a SettingError. what: what did not fit. param: the setting to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        line = str(error).splitlines()[0]
        raise SettingError(f"{what} does not fit into the device's memory: {line}", param=param) from error


def profile_lengths(max_num_tokens: int, max_num_reqs: int, max_model_len: int) -> list[int]:
    """Return the tokens of each request of the profile run: ``max_num_tokens`` spread evenly, the rest over the first ones.

    No request is longer than ``max_model_len``, and none is empty.
    """
    num_reqs = min(max_num_reqs, max_num_tokens)
    quotient, remainder = divmod(max_num_tokens, num_reqs)
    lengths = (quotient + 1 if index < remainder else quotient for index in range(num_reqs))
    return [min(length, max_model_len) for length in lengths]
