"""The settings of an engine, in groups; see ``contract.options``."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from contract.options import Options, PeerOptions
from contract.sampling import MAX_GRAMMAR_BYTES


class RankOptions(Options):
    """The processes of a worker."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes (on CUDA: devices) of each worker among which weights and KV heads are divided; workers may differ in it."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Workers of a group over which the experts of a model are spread, and which make each step together; each of them is a
    worker like any other to the routers."""


class NumberOptions(Options):
    """The number formats, which decide the memory of weights and KV."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the weights and of the computation; auto: that of the checkpoint."""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the KV; auto: dtype. Of float32 and bfloat16 each may hold the KV of the other; plain torch then
    attends, on CPUs and GPUs."""


class ModelOptions(NumberOptions, RankOptions):
    """The model's length, implementation and processes."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum number of tokens of prompt and answer together; unset: the model's own limit."""
    all_reduce: Literal["nccl", "symmetric"] = "nccl"
    """Sums of a worker's GPUs: by NCCL, or up to 8 MiB by torch's symmetric memory (they read each other's parts)."""
    attention_backend: Literal["auto", "hybrid", "flashinfer", "triton", "torch"] = "auto"
    """Implementation of attention; hybrid: FlashInfer for steps with chunks of prompts, Triton for decodes; auto: on CUDA
    hybrid if FlashInfer is installed, else Triton; on the CPU own kernels or torch."""
    fp8_products: Literal["auto", "on", "off"] = "auto"
    """Multiply FP8 weights as FP8, instead of converting them to dtype; auto: on NVIDIA GPUs from Ada on, in bfloat16."""
    enforce_eager: bool = False
    """Disable CUDA graphs: slower decode steps, faster start."""
    cudagraph_mode: Literal["none", "full_decode_only", "full_and_piecewise"] = "full_decode_only"
    """Steps that are CUDA graphs: none (as enforce_eager), decodes, or also steps with chunks of up to 512 tokens in all, as
    pieces between which attention runs (never measured yet)."""


class BatchingOptions(Options):
    """The contents of a step, and its start."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Maximum number of concurrently running requests of one worker."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Maximum number of tokens in one step of one worker; longer prompts are computed in chunks of this size."""
    max_num_mixed_tokens: int = Field(default=512, ge=1)
    """Maximum number of prompt tokens in a step that also decodes; more of them delay the next tokens of running answers."""
    scheduling_policy: Literal["chunked-prefill", "prefill-first"] = "chunked-prefill"
    """The requests that share a step; chunked-prefill: answers, and prompts in chunks; prefill-first: only whole prompts, or
    only answers if no prompt can start. A prompt longer than max_num_batched_tokens is rejected then, and that is the length
    which a worker reports."""
    scheduler_delay_factor: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """With prefill-first: while answers run, prompts wait for this factor times the length of the last step of prompts, so
    that several of them share the next one."""
    enable_run_ahead: bool = True
    """On a GPU, start the next step before the tokens of the last one have left it, if no request can join or change it."""
    max_hold_share: float = Field(default=0.03, ge=0, le=1)
    """Maximum share of time for which steps may be delayed so that arriving requests can join them; 0: never."""
    max_key_slowdown: float = Field(default=1.25, ge=0, allow_inf_nan=False)
    """Factor by which the requests of one API key may lengthen the steps of other keys; 0: no limit."""
    speculate: Literal["none", "ngram"] = "none"
    """Guess coming tokens and verify several in one step; ngram: what followed the last tokens where they occurred before in
    prompt or answer. The tokens of an answer do not change; it helps where answers repeat parts of their prompts."""
    num_speculative_tokens: int = Field(default=8, ge=1, le=32)
    """Maximum number of guessed tokens of a request in a step; fewer where they are seldom right or steps are long."""

    @property
    def max_num_decode_tokens(self) -> int:
        """The largest number of tokens in a step that only continues answers; each has a row of logits."""
        return self.max_num_seqs + (0 if self.speculate == "none" else self.num_speculative_tokens)

    @property
    def max_prompt_tokens(self) -> int | None:
        """The longest prompt that is computed here; None: only the engine's other limits apply."""
        return self.max_num_batched_tokens if self.scheduling_policy == "prefill-first" else None


class KVCacheOptions(Options):
    """The pool of KV blocks, and the wait for blocks of another worker."""

    block_size: int = Field(default=16, ge=1, le=1024)
    """Number of tokens in a KV block."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Size of each worker's KV pool, reserved at start; unset: on the CPU the smaller of 1 GiB and a quarter of free memory
    divided by the number of workers, on CUDA measured."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that all workers on it together may use."""
    gpu_memory_reserve_bytes: int = Field(default=512 * 2**20, ge=0)
    """Bytes of a GPU's free memory that each worker leaves free for later: the driver's part of graphs, NCCL."""
    enable_prefix_caching: bool = True
    """Reuse the KV of finished requests for prompts with the same prefix."""
    state_snapshots: int = Field(default=0, ge=0, le=65536)
    """Number of states of recurrent layers that are kept for prompts with the same prefix, in the KV pool; 0: no prefix is
    reused by a model with such layers. Other models ignore it."""
    host_kv_bytes: int = Field(default=0, ge=0)
    """Host memory of each worker for copies of full KV blocks, which a resumed request or a prompt with the same prefix
    loads instead of computing them again; its ranks have equal parts. 0: none."""
    disk_kv_dir: Path | None = None
    """Folder for copies of full KV blocks that survive a restart; a worker with a name uses a folder of that name in it, and
    each of several ranks one in that. One engine uses it at a time. Unset: none."""
    disk_kv_bytes: int = Field(default=16 * 2**30, ge=1)
    """Size of the files in disk_kv_dir; the ranks of a worker have equal parts."""
    remote_kv_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time that a request may wait for KV before it ends with an error; a dead worker is detected sooner."""


class GrammarOptions(Options):
    """The cost that the grammar of a request may have."""

    max_grammar_bytes: int = Field(default=2**16, ge=1, le=MAX_GRAMMAR_BYTES)
    """Maximum size of a JSON schema, regular expression or grammar that an answer must match."""
    grammar_timeout_seconds: float = Field(default=10.0, gt=0)
    """Time for compiling one before the request ends with an error."""


class HealthOptions(PeerOptions):
    """The time limits after which another process counts as dead, and the engine as hung."""

    step_timeout_seconds: float = Field(default=30.0, gt=0)
    """Time without progress after which the engine counts as hung and is restarted; a step that keeps computing may take
    20 times as long."""


class HostOptions(Options):
    """The share of its machine that an engine may use."""

    workers_on_host: int = Field(default=1, ge=1)
    """Number of workers that share this machine's memory."""
    num_threads: int = Field(default=1, ge=1)
    """Number of threads that compute the model."""


# Help texts list the fields of the last base first.
class EngineOptions(HealthOptions, GrammarOptions, KVCacheOptions, BatchingOptions, ModelOptions):
    """All options of an engine that users give, wherever it runs."""
