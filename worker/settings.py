"""The settings of one worker process, and the parts of them that its engine and its connector get."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from contract.identity import Role
from contract.requests import MAX_GRAMMAR_BYTES
from engine.settings import EngineSettings
from kv_transfer.settings import TransferSettings, TransportName
from serving.settings import Address, Settings, read_secret_file
from worker.cores import parse_cores


class WorkerSettings(Settings):
    """One prefill, decode or aggregated worker."""

    model: Path
    """Folder of the Hugging Face checkpoint."""
    router: Address = "127.0.0.1:9100"
    """HOST:PORT of the router's internal port; the worker registers there."""
    secret_file: Path | None = None
    """File with the cluster secret (mode 0600)."""
    worker_id: str | None = None
    """Name of this worker, unique in the cluster; made from role and process id where unset."""
    served_model_name: str | None = None
    """Name under which clients ask for the model; the folder's name where unset."""
    host: str = "127.0.0.1"
    """Interface that the worker's internal ports bind to; other workers and the router must reach it."""
    advertise_host: str | None = None
    """Host that the router and other workers dial; needed where host is a wildcard such as 0.0.0.0."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the worker's gRPC service; 0 picks a free one."""
    control_port: int = Field(default=0, ge=0, le=65535)
    """Port of the control link to other workers; 0 picks a free one."""
    data_port: int = Field(default=0, ge=0, le=65535)
    """Port of the KV data that other workers fetch by transport tcp (or nixl or nccl); 0 picks a free one. Each further
    rank has the next one."""
    admin: Address = "127.0.0.1:0"
    """HOST:PORT of /health, /ready, /metrics and /debug/state."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV; auto is the checkpoint's own."""
    transport: TransportName = "auto"
    """How KV blocks travel: shm (workers on one machine), nixl, nccl, tcp, or auto, the best that both workers can do."""
    shm_dir: Path | None = None
    """Folder of the sockets of transport shm; containers share it by a volume. Unset: a fresh private one in /tmp."""
    block_size: int = Field(default=16, ge=1, le=1024)
    """Tokens of a KV block."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Requests that may run at once."""
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    """Tokens of one step; longer prompts are computed in chunks of this size."""
    max_num_mixed_tokens: int = Field(default=512, ge=1)
    """Tokens of prompts in a step in which answers go on as well: their next tokens wait for it."""
    max_hold_share: float = Field(default=0.03, ge=0, le=1)
    """Share of the time in which a decode worker may hold steps for answers that are about to join them; 0: never."""
    max_key_slowdown: float = Field(default=1.25, ge=0)
    """How many times as long one API key's answers and prompts may make the steps of other keys; 0: not bounded."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens up to which a prefill worker is given more requests; two steps' worth where unset."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; the model's own where unset."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of the KV pool, had at once; unset: CPU min(1 GiB, a quarter of free memory / workers), CUDA measured."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that a worker may use."""
    workers_on_host: int = Field(default=1, ge=1)
    """Workers that share this machine's memory."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished prompts for prompts that begin alike."""
    num_threads: int = Field(default=1, ge=1)
    """Threads that compute the model."""
    cores: str | None = None
    """Cores that the worker's processes are kept to, as 0-3,8; each thread that computes has one of them. Unset: any."""
    nice: int = Field(default=0, ge=0, le=19)
    """How far the worker gives way to other processes on the same cores, as nice(1) counts it."""
    attention_backend: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    """What computes attention; auto: on CUDA FlashInfer where it is installed, else Triton; on the CPU kernels or torch."""
    enforce_eager: bool = False
    """Do without CUDA graphs: decode steps are slower, and start-up is faster."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes (on CUDA: devices) that share the model's weights and KV heads; workers may differ in it."""
    remote_kv_timeout_seconds: float = Field(default=300.0, gt=0)
    """How long a request may wait for its KV before it ends with an error. A dead peer is noticed far sooner."""
    max_grammar_bytes: int = Field(default=2**16, ge=1, le=MAX_GRAMMAR_BYTES)
    """How long a JSON schema, pattern or grammar that answers must match may be."""
    grammar_timeout_seconds: float = Field(default=10.0, gt=0)
    """How long it may take to compile one, before the request ends with an error."""
    lease_seconds: float = Field(default=30.0, gt=0)
    """How long computed KV is lent to a decode worker that gives no sign of life."""
    peer_timeout_seconds: float = Field(default=3.0, gt=0)
    """Silence on the control link after which the other worker counts as dead. The worker's own engine counts as stopped
    when it has had no time on a processor for so long."""
    step_timeout_seconds: float = Field(default=30.0, gt=0)
    """Time without progress after which the engine counts as hung and is started again; a step that computes all the
    while may take 20 times as long."""

    @model_validator(mode="after")
    def _check_advertise_host(self) -> Self:
        if self.host in ("0.0.0.0", "::", "") and not self.advertise_host:
            raise ValueError(f"host is {self.host!r}: set advertise_host to the name that others dial")
        return self

    @model_validator(mode="after")
    def _check_cores(self) -> Self:
        num_cores = len(self.core_numbers)
        if self.cores is not None and num_cores < self.num_threads:
            raise ValueError(
                f"cores is {self.cores!r}, {num_cores} for num_threads {self.num_threads}: name more"
            )
        return self

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.lease_seconds < self.peer_timeout_seconds:
            raise ValueError(
                f"lease_seconds is {self.lease_seconds}: it must be peer_timeout_seconds"
                f" ({self.peer_timeout_seconds}) or more, else leases end between two signs of life"
            )
        return self

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """The cores to run on; empty: any."""
        return () if self.cores is None else parse_cores(self.cores)

    def read_secret(self) -> str:
        """The cluster secret; raises SettingError where there is none."""
        return read_secret_file(self.secret_file)

    def engine(self) -> EngineSettings:
        """The engine's part."""
        return EngineSettings(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_mixed_tokens=self.max_num_mixed_tokens,
            max_hold_share=self.max_hold_share,
            max_key_slowdown=self.max_key_slowdown,
            max_model_len=self.max_model_len,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            workers_on_host=self.workers_on_host,
            enable_prefix_caching=self.enable_prefix_caching,
            num_threads=self.num_threads,
            cores=self.core_numbers,
            attention_backend=self.attention_backend,
            enforce_eager=self.enforce_eager,
            tensor_parallel_size=self.tensor_parallel_size,
            remote_kv_timeout_seconds=self.remote_kv_timeout_seconds,
            peer_timeout_seconds=self.peer_timeout_seconds,
            step_timeout_seconds=self.step_timeout_seconds,
            max_grammar_bytes=self.max_grammar_bytes,
            grammar_timeout_seconds=self.grammar_timeout_seconds,
        )

    def transfer(self, role: Role, worker_id: str, boot_id: str) -> TransferSettings:
        """The connector's part."""
        return TransferSettings(
            worker_id=worker_id,
            boot_id=boot_id,
            role=role,
            secret=self.read_secret(),
            host=self.host,
            advertise_host=self.advertise_host,
            control_port=self.control_port,
            data_port=self.data_port,
            transport=self.transport,
            shm_dir=self.shm_dir,
            lease_seconds=self.lease_seconds,
            parked_seconds=self.remote_kv_timeout_seconds,
            peer_timeout_seconds=self.peer_timeout_seconds,
        )
