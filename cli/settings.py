"""The settings of the commands that are more than one service, and the environment that all of them read."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress

from contract.errors import SettingError
from serving.settings import Address, Settings

DEMO = "demo"
"""The name of the model that is shipped with the package."""

LogLevel = Literal["debug", "info", "warning", "error"]
PREFIX = "KVBATON_"
_SERVICE_SETTINGS = (("router.settings", "RouterSettings"), ("worker.settings", "WorkerSettings"))


def _check_ready_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError("it must be a file in a folder that exists and can be written to")
    return path


class ServiceSettings(Settings):
    """What every single-service command adds to its service's own settings."""

    log_level: LogLevel = "info"
    """The least important log records that are written."""
    ready_fd: CliSuppress[int | None] = None
    """Open file descriptor that gets one JSON line when the service is ready; used by `kvbaton up`."""
    parent_pid: CliSuppress[int | None] = None
    """The process that this one shall not outlive; used by `kvbaton up`."""


class LocalSettings(Settings):
    """The processes of one machine: how many, on which model, how the workers run."""

    model: str = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model that comes with kvbaton."""
    served_model_name: str | None = None
    """Name under which clients ask for the model; unset: the id, or the folder's name."""
    prefill: int | None = Field(default=None, ge=0, le=64)
    """Workers that compute prompts and hand their KV over; 1 where no pool is given."""
    decode: int | None = Field(default=None, ge=0, le=64)
    """Workers that fetch KV and stream tokens; 1 where no pool is given."""
    both: int | None = Field(default=None, ge=0, le=64)
    """Aggregated workers, which do both without a hand-over."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    transport: Literal["auto", "tcp"] = "auto"
    """How KV blocks travel; auto is tcp in this version."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and KV; auto is the checkpoint's own."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Tokens of prompt and answer together; unset: the model's own limit."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Requests that may run at once on one worker."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one step of one worker; longer prompts are computed in chunks of this size."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Bytes of each worker's KV pool; unset: measured."""
    num_threads: int | None = Field(default=None, ge=1)
    """Threads of each worker; unset: the machine's cores shared evenly."""
    http: Address = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    ready_file: Annotated[Path | None, AfterValidator(_check_ready_file)] = None
    """File that says, once the service can answer, where everything listens (JSON)."""
    secret_file: Path | None = None
    """File with the cluster's secret; unset: a fresh one, private to these processes."""
    log_level: LogLevel = "info"
    """The least important log records that are written."""

    @model_validator(mode="after")
    def _check_pools(self) -> "LocalSettings":
        num_prefill, num_decode, num_both = self.pools
        if bool(num_prefill) != bool(num_decode):
            missing, there = ("decode", "prefill") if num_prefill else ("prefill", "decode")
            raise ValueError(
                f"{there} is {num_prefill or num_decode} but {missing} is 0; the two need each other"
            )
        if not num_prefill + num_both:
            raise ValueError("prefill, decode and both are all 0; there must be at least one worker")
        return self

    @property
    def pools(self) -> tuple[int, int, int]:
        """How many prefill, decode and aggregated workers; one of each of the first two where nothing was asked."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 1, 1, 0
        return self.prefill or 0, self.decode or 0, self.both or 0


class UpSettings(LocalSettings):
    """Start a router and its workers on this machine, and keep them running.

    Without a pool (--prefill, --decode, --both) it starts one prefill and one decode worker. A worker that dies is
    started again. Ctrl-C or SIGTERM stops everything.

    Examples:
      kvbaton up
      kvbaton up --model Qwen/Qwen2.5-0.5B-Instruct --prefill 2 --decode 2
      kvbaton up --http 127.0.0.1:0 --grpc 127.0.0.1:0 --ready-file ready.json
    """


class ServeSettings(LocalSettings):
    """Serve a model by one aggregated worker, without a hand-over; the same as `kvbaton up --both 1 --model MODEL`.

    Example: kvbaton serve Qwen/Qwen2.5-0.5B-Instruct
    """

    model: CliPositionalArg[str] = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model that comes with kvbaton."""
    both: int | None = Field(default=1, ge=0, le=64)
    """Aggregated workers, which compute prompts and decode them without a hand-over."""


class RunSettings(LocalSettings):
    """Answer one prompt and end.

    Asks the service at --url, or without one starts the model on free ports for this one answer.

    Examples:
      kvbaton run "What do you know?"
      kvbaton run --url http://127.0.0.1:8000 "What do you know?"
    """

    prompt: CliPositionalArg[str]
    """What to answer."""
    url: str | None = Field(default=None, pattern=r"^https?://\S+$")
    """A running service, as http://HOST:PORT."""
    raw: bool = False
    """Continue the prompt as it stands, without the model's chat template."""
    max_tokens: int | None = Field(default=None, ge=1)
    """At most this many new tokens; unset: what fits the model."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 always takes the most likely token."""
    http: Address = "127.0.0.1:0"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:0"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    log_level: LogLevel = "error"
    """The least important log records that are written."""


class DemoSettings(LocalSettings):
    """Show the relay: start 1 prefill and 1 decode worker, ask one question by HTTP and one by gRPC, keep serving."""

    log_level: LogLevel = "error"
    """The least important log records that are written."""


def refuse_unknown_variables(settings_class: type[Settings]) -> None:
    """Raise SettingError for a ``KVBATON_*`` variable that is no setting of any command: a typo sets nothing."""
    asked = {name[len(PREFIX) :].lower() for name in os.environ if name.upper().startswith(PREFIX)}
    unknown = asked - settings_class.model_fields.keys()
    if unknown and (unknown := unknown - set(_all_settings())):
        names = ", ".join(sorted(f"{PREFIX}{name.upper()}" for name in unknown))
        raise SettingError(
            f"{names} in the environment is no setting of kvbaton; see `kvbaton COMMAND --help`"
        )


def _all_settings() -> Iterator[str]:
    for own in (ServiceSettings, UpSettings, ServeSettings, RunSettings, DemoSettings):
        yield from own.model_fields
    for module, name in _SERVICE_SETTINGS:
        yield from getattr(import_module(module), name).model_fields


def child_environment() -> dict[str, str]:
    """What child processes inherit: this environment, without gRPC's own chatter unless it was asked for."""
    return {"GRPC_VERBOSITY": "ERROR", **os.environ}


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
