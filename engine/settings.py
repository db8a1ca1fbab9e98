"""The part of the settings that an engine needs, checked when it is made."""

from dataclasses import dataclass
from pathlib import Path

from contract.errors import SettingError
from contract.requests import MAX_GRAMMAR_BYTES

ATTENTION_BACKENDS = ("auto", "flashinfer", "triton", "torch")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How one engine runs. Raises SettingError with the name, the value and the allowed range.

    model: folder of a Hugging Face checkpoint. dtype: "auto" is the checkpoint's own. max_num_batched_tokens: of a step;
    max_num_mixed_tokens: of prompts, in a step in which answers go on as well. max_hold_share: of the time, in
    which steps are held, or computed in vain, for requests that join them. max_key_slowdown: how many times as long one
    client may make the steps of others; 0: not bounded. max_model_len: None is the model's own.
    kv_cache_bytes: None lets the start-up decide (CPU: min(1 GiB, a quarter of free memory / workers_on_host); CUDA: total ×
    gpu_memory_utilization / workers_on_host − peak). num_threads: that compute. cores: where each of them is kept, if there
    are any (the process itself is kept there by whoever starts it).
    tensor_parallel_size: ranks that share the model, each in a process of its own where there are several; threads
    and (on the host) KV bytes are divided among them. rank_timeout_seconds: silence of a rank within a step, after
    which the engine ends. peer_timeout_seconds: without time on a processor, after which a process of the engine counts as
    stopped. step_timeout_seconds: of a step that neither ends nor computes, after which it counts as hung.
    attention_backend: see ``engine.attention.choice``. enforce_eager: no CUDA graphs.
    max_grammar_bytes, grammar_timeout_seconds: how long a grammar may be, and take to compile.
    """

    model: Path
    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int = 512
    max_hold_share: float = 0.03
    max_key_slowdown: float = 1.25
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    workers_on_host: int = 1
    enable_prefix_caching: bool = True
    num_threads: int = 1
    cores: tuple[int, ...] = ()
    attention_backend: str = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    rank_timeout_seconds: float = 60.0
    peer_timeout_seconds: float = 3.0
    step_timeout_seconds: float = 30.0
    remote_kv_timeout_seconds: float = 300.0
    max_grammar_bytes: int = 2**16
    grammar_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        """Check every range."""
        _at_least("block_size", self.block_size, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_num_mixed_tokens", self.max_num_mixed_tokens, 1)
        _at_least("num_threads", self.num_threads, 1)
        _at_least("workers_on_host", self.workers_on_host, 1)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.kv_cache_bytes is not None:
            _at_least("kv_cache_bytes", self.kv_cache_bytes, 1)
        if self.dtype not in DTYPES:
            raise SettingError(f"dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}", param="dtype")
        if self.attention_backend not in ATTENTION_BACKENDS:
            raise SettingError(
                f"attention_backend is {self.attention_backend!r}; choose one of {', '.join(ATTENTION_BACKENDS)}",
                param="attention_backend",
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise SettingError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must lie in (0, 1]",
                param="gpu_memory_utilization",
            )
        if not 0.0 <= self.max_hold_share <= 1.0:
            raise SettingError(
                f"max_hold_share is {self.max_hold_share}; it must lie in 0..1", param="max_hold_share"
            )
        if not 0.0 <= self.max_key_slowdown < float("inf"):
            raise SettingError(
                f"max_key_slowdown is {self.max_key_slowdown}; it must be 0 or more", param="max_key_slowdown"
            )
        _above_zero("remote_kv_timeout_seconds", self.remote_kv_timeout_seconds)
        for name in ("rank_timeout_seconds", "peer_timeout_seconds", "step_timeout_seconds"):
            _above_zero(name, getattr(self, name))
        _above_zero("grammar_timeout_seconds", self.grammar_timeout_seconds)
        if not 1 <= self.max_grammar_bytes <= MAX_GRAMMAR_BYTES:
            raise SettingError(
                f"max_grammar_bytes is {self.max_grammar_bytes}; it must lie in 1..{MAX_GRAMMAR_BYTES}",
                param="max_grammar_bytes",
            )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise SettingError(f"{name} is {value}; it must be {low} or more", param=name)


def _above_zero(name: str, value: float) -> None:
    if value <= 0:
        raise SettingError(f"{name} is {value}; it must be above 0", param=name)
