"""The settings of an engine that users give, in groups; see ``contract.options``."""

from typing import Literal

from pydantic import Field

from contract.options import Options, PeerOptions
from contract.requests import MAX_GRAMMAR_BYTES


class ModelOptions(Options):
    """The model's number format, length and processes."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV; auto is the checkpoint's own."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; unset: the model's own limit."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes (on CUDA: devices) of each worker that share the model's weights and KV heads; workers may differ in it."""
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    """What computes attention; auto: on CUDA FlashInfer where it is installed, else Triton; on the CPU kernels or torch."""
    enforce_eager: bool = False
    """Do without CUDA graphs: decode steps are slower, and start-up is faster."""


class BatchingOptions(Options):
    """The contents of a step, and its start."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Requests that may run at once on one worker."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens of one step of one worker; longer prompts are computed in chunks of this size."""
    max_num_mixed_tokens: int = Field(default=512, ge=1)
    """Tokens of prompts in a step in which answers go on as well: their next tokens wait for it."""
    max_hold_share: float = Field(default=0.03, ge=0, le=1)
    """Share of the time in which steps may be held for answers that are about to join them; 0: never."""
    max_key_slowdown: float = Field(default=1.25, ge=0, allow_inf_nan=False)
    """How many times as long one API key's answers and prompts may make the steps of other keys; 0: not bounded."""


class KVCacheOptions(Options):
    """The pool of KV blocks, and the wait for blocks of another worker."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV block."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of each worker's KV pool, all reserved at start; unset: CPU min(1 GiB, a quarter of free memory / workers), CUDA
    measured."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that all workers on it may use together."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished prompts for prompts that begin alike."""
    remote_kv_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a request may wait for its KV before it ends with an error. A dead peer is noticed far sooner."""


class GrammarOptions(Options):
    """The cost that the grammar of a request may have."""

    max_grammar_bytes: int = Field(default=2**16, ge=1, le=MAX_GRAMMAR_BYTES)
    """How long a JSON schema, pattern or grammar that answers must match may be."""
    grammar_timeout_seconds: float = Field(default=10.0, gt=0)
    """How long it may take to compile one, before the request ends with an error."""


class HealthOptions(PeerOptions):
    """The time limits after which another process counts as dead, and the engine as hung."""

    step_timeout_seconds: float = Field(default=30.0, gt=0)
    """Time without progress after which the engine counts as hung and is started again; a step that computes all the
    while may take 20 times as long."""


class HostOptions(Options):
    """An engine's share of its machine."""

    workers_on_host: int = Field(default=1, ge=1)
    """Workers that share this machine's memory."""
    num_threads: int = Field(default=1, ge=1)
    """Threads that compute the model."""


# Help texts list the fields of the last base first.
class EngineOptions(HealthOptions, GrammarOptions, KVCacheOptions, BatchingOptions, ModelOptions):
    """All options of an engine that users give, wherever it runs."""
