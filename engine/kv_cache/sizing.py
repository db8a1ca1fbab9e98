"""The memory that the KV cache may take. Measuring is a protocol, so that every formula runs on every machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import torch

from contract.errors import SettingError
from engine.settings import EngineSettings

HOST_LIMIT_BYTES = 1 << 30
_HOST_SHARE = 4
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryReading:
    """Memory in bytes. peak: the most that this process held on the device since ``start``, weights included.

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
    """The memory of one CUDA device; the peak is what torch's allocator had reserved."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """See MemoryProbe."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        """See MemoryProbe."""
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(total, free, torch.cuda.max_memory_reserved(self._device), is_host=False)


def create_probe(device: torch.device) -> MemoryProbe:
    """Return the probe for this device."""
    return CudaProbe(device) if device.type == "cuda" else HostProbe()


def available_kv_bytes(reading: MemoryReading, settings: EngineSettings) -> int:
    """Return the bytes for the KV cache of one rank.

    ``kv_cache_bytes`` wins. Host: min(1 GiB, a quarter of the free memory / workers on the host). Both are the whole
    worker's: its ranks share them evenly. Device (each rank has its own): total × utilisation / workers on that
    device − peak. Raises SettingError if nothing is left on the device.
    """
    if settings.kv_cache_bytes is not None:
        return settings.kv_cache_bytes // settings.tensor_parallel_size
    if reading.is_host:
        share = reading.free_bytes // _HOST_SHARE // settings.workers_on_host
        return min(HOST_LIMIT_BYTES, share) // settings.tensor_parallel_size
    share = int(reading.total_bytes * settings.gpu_memory_utilization / settings.workers_on_host)
    if share <= reading.peak_bytes:
        raise SettingError(
            f"gpu_memory_utilization {settings.gpu_memory_utilization} of {reading.total_bytes} bytes over "
            f"{settings.workers_on_host} workers is {share} bytes, and the model alone needs {reading.peak_bytes}; "
            "raise it, or run fewer workers on this device",
            param="gpu_memory_utilization",
        )
    return share - reading.peak_bytes


def profile_lengths(max_num_tokens: int, max_num_reqs: int, max_model_len: int) -> list[int]:
    """Return the tokens of each request of the profile run: ``max_num_tokens`` spread evenly, the rest over the first ones.

    No request is longer than ``max_model_len``, and none is empty.
    """
    num_reqs = min(max_num_reqs, max_num_tokens)
    quotient, remainder = divmod(max_num_tokens, num_reqs)
    lengths = (quotient + 1 if index < remainder else quotient for index in range(num_reqs))
    return [min(length, max_model_len) for length in lengths]
