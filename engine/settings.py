"""What an engine is started with, checked when it is made."""

from pathlib import Path

from pydantic import Field

from contract.options import PartSettings
from engine.options import EngineOptions, HostOptions


class EngineSettings(EngineOptions, HostOptions, PartSettings):
    """How one engine runs. Raises SettingError with the name, the value and the allowed range.

    kv_cache_bytes: None lets the start-up decide (CPU: min(1 GiB, a quarter of free memory / workers_on_host); CUDA: total ×
    gpu_memory_utilization / workers_on_host − peak). tensor_parallel_size: each rank is a process of its own where there are
    several; threads and (on the host) KV bytes are divided among them. attention_backend: see ``engine.attention.choice``.
    """

    model: Path
    """Folder of a Hugging Face checkpoint."""
    device: str = "cpu"
    """Where the model runs: auto, cpu, cuda or cuda:INDEX."""
    cores: tuple[int, ...] = ()
    """The cores that compute threads are kept to, one each; empty: any. The caller pins the process itself."""
    rank_timeout_seconds: float = Field(default=60.0, gt=0)
    """Silence of a rank within a step, after which the engine ends."""
