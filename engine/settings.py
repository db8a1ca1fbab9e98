"""The settings of one engine, checked when they are made."""

from pathlib import Path

from pydantic import Field, model_validator

from contract.errors import SettingError
from contract.options import PartSettings
from engine.options import EngineOptions, HostOptions


class EngineSettings(EngineOptions, HostOptions, PartSettings):
    """All settings of one engine. Raises SettingError with the name, the value and the allowed range.

    kv_cache_bytes: None for a value that is found at start (CPU: min(1 GiB, a quarter of free memory / workers_on_host);
    CUDA: see ``available_kv_bytes``). tensor_parallel_size: several ranks are processes of their own; threads and (on the
    host) KV bytes are divided among them. attention_backend: see ``engine.attention.backend``.
    """

    model: Path
    """Folder of a Hugging Face checkpoint."""
    device: str = "cpu"
    """The device of the model: auto, cpu, cuda or cuda:INDEX."""
    cores: tuple[int, ...] = ()
    """The cores that compute threads are kept to, one each; empty: any. The caller pins the process itself."""
    data_parallel_rank: int = Field(default=0, ge=0)
    """The number of this engine in its group, from 0."""
    data_parallel_store: str = ""
    """HOST:PORT of the store at which the group's collectives find each other."""
    data_parallel_host: str = "127.0.0.1"
    """Host on which the other engines of the group reach this one's collectives."""
    keeps_all_tokens: bool = False
    """Layers with a window keep the KV of all tokens, too; for comparisons."""
    rank_timeout_seconds: float = Field(default=60.0, gt=0)
    """Silence of a rank within a step, after which the engine ends."""

    @model_validator(mode="after")
    def _check_tiers(self) -> "EngineSettings":
        for name in ("host_kv_bytes", "disk_kv_dir"):
            value = getattr(self, name)
            if not value:
                continue
            without = "set it to 0" if name == "host_kv_bytes" else "leave it unset"
            given = f"{name} is {value}"
            if not self.enable_prefix_caching:
                message = (
                    f"{given}, and blocks are found by their prefix: set enable_prefix_caching, or {without}"
                )
                raise SettingError(message, param=name)
        return self
