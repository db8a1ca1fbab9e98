"""The settings of the commands that are more than one service, and the environment that all of them read."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress, SettingsConfigDict

from contract.errors import SettingError
from serving.settings import FLAG, Address, Settings
from serving.settings_file import is_secret, nearest
from worker.options import WorkerOptions

DEMO = "demo"
"""The name of the model that is shipped with the package."""

LogLevel = Literal["debug", "info", "warning", "error"]
PREFIX = "KVBATON_"


def _check_ready_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError("it must be a file in a folder that exists and can be written to")
    return path


def _as_url(value: str) -> str:
    url = value if "://" in value else f"http://{value}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or any(character.isspace() for character in url):
        raise ValueError("it must be http://HOST:PORT, https://HOST or HOST:PORT")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_as_url)]
"""Where a service listens; HOST:PORT is taken as http://HOST:PORT."""


class CommandSettings(Settings):
    """What every command has."""

    config: Path | None = None
    """TOML file with settings; a table named after a command is for that command only."""
    log_level: LogLevel = "info"
    """The least important log records that are written."""


class ServiceSettings(CommandSettings):
    """What every single-service command adds to its service's own settings."""

    ready_fd: CliSuppress[int | None] = None
    """Open file descriptor that gets one JSON line when the service is ready; used by `kvbaton up`."""
    parent_pid: CliSuppress[int | None] = None
    """The process that this one shall not outlive; used by `kvbaton up`."""


class PoolSettings(CommandSettings):
    """Which model the processes of one machine serve, and how many workers there are."""

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


class LocalSettings(WorkerOptions, PoolSettings):
    """The processes of one machine: how many, on which model, how the workers run."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of each worker; unset: the machine's cores shared evenly."""
    pin_cores: bool = False
    """Keep each worker to cores of its own, as many as it has threads; for machines with nothing else to do."""
    prefill_nice: int = Field(default=5, ge=0, le=19)
    """How far prefill workers on the CPU give way to decode workers on the same cores, as nice(1) counts it."""
    http: Address = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    ready_file: Annotated[Path | None, AfterValidator(_check_ready_file)] = None
    """File that says, once the service can answer, where everything listens (JSON)."""
    secret_file: Path | None = None
    """File with the cluster's secret; unset: a fresh one, private to these processes."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running answers may go on when the service is stopped; then they end with an error. A second signal: now."""
    files_dir: Path | None = None
    """Folder of /v1/files and /v1/batches, which are off without it; a service that ends with its command keeps none."""

    @property
    def keeps_files(self) -> bool:
        """Whether the service may have files and batches: it is not there for one command alone."""
        return True

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


class ClientSettings(LocalSettings):
    """What the commands that ask a model share: the service at --url, or without one their own on free ports."""

    url: Url | None = None
    """A running service (http://127.0.0.1:8000); unset: this command starts its own, and ends it."""
    api_key: str | None = Field(default=None, repr=False)
    """Key of the service at --url; the variable shows it to nobody else on this machine, the flag does."""
    ca_file: Path | None = None
    """Certificates (PEM) of the authorities that vouch for an https service at --url; unset: those of this machine."""
    http: Address = "127.0.0.1:0"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:0"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    log_level: LogLevel = "error"
    """The least important log records that are written."""

    @property
    def keeps_files(self) -> bool:
        """Return False: another service may have the folder that the environment names."""
        return False

    def refuse_contradictions(self) -> None:
        """Raise SettingError for flags that say how to start a service, where --url names a running one."""
        if self.url is None:
            return
        flags = {name for name, origin in self.sources.origins.items() if origin == FLAG}
        useless = sorted((flags & LocalSettings.model_fields.keys()) - _USEFUL_WITH_URL)
        if useless:
            names = ", ".join(f"--{name.replace('_', '-')} {getattr(self, name)}" for name in useless)
            raise SettingError(
                f"url is {self.url}, a service that runs already, so {names} would change nothing: leave out either"
                " (--served-model-name is the name to ask a running service for)",
                param=useless[0],
            )


_USEFUL_WITH_URL = frozenset({"served_model_name", "config", "log_level"})


class AskSettings(ClientSettings):
    """How the commands that ask questions of their own want them answered."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 always takes the most likely token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """At most this many new tokens; unset: what fits the model."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Seed of the sampling; unset: drawn by the router."""


class RunSettings(AskSettings):
    """Answer one prompt and end.

    Asks the service at --url, or without one starts the model on free ports for this one answer.

    Examples:
      kvbaton run "What do you know?"
      kvbaton run --url http://127.0.0.1:8000 "What do you know?"
    """

    prompt: CliPositionalArg[str]
    """What to answer."""
    raw: bool = False
    """Continue the prompt as it stands, without the model's chat template."""


class CheckSettings(CommandSettings):
    """Say what a model folder is, and what its chat template can show; no weights are read.

    Exit codes: 0 no problem, 1 problems, 2 no model folder.

    Examples:
      kvbaton check ~/models/Qwen3-8B
      kvbaton check --json ~/models/Qwen3-8B
    """

    model: CliPositionalArg[str] = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model that comes with kvbaton."""
    as_json: bool = False
    """Print one JSON object; --json says the same."""


class ChatSettings(AskSettings):
    """Chat in the terminal, with the service at --url, or with a model that is started on free ports.

    Ctrl-C stops the answer, Ctrl-D or /exit leaves, /help lists the other commands; a line that ends with a backslash
    goes on in the next one. With piped input each line is one message.

    Examples:
      kvbaton chat
      kvbaton chat --url 127.0.0.1:8000 --temperature 0.7 --system "Answer in one sentence."
      echo "What do you know?" | kvbaton chat --url 127.0.0.1:8000
    """

    system: str | None = None
    """System message that the conversation begins with."""


class BatchSettings(ClientSettings):
    """Answer the requests of a file: one JSON object a line, in the format of OpenAI's batches.

    Asks the service at --url, or without one starts the model for this batch. Answers are written as they come. Run again
    with the same files it asks what has no answer yet. Exit code: 0 all answered, 1 some were not, 130 stopped by Ctrl-C.

    Examples:
      kvbaton batch -i questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
      kvbaton batch -i questions.jsonl -o answers.jsonl --url http://127.0.0.1:8000
    """

    model_config = SettingsConfigDict(cli_shortcuts={"input": "i", "output": "o"})

    input: Path
    """File with one request a line: custom_id, method, url and body."""
    output: Path
    """File that gets one line an answer: id, custom_id, response and error."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests that are asked at the same time."""
    max_retries: int = Field(default=10, ge=0)
    """How often a request is asked again after 429, 503 or a lost connection, after the pause that the service asks for."""


class DemoSettings(LocalSettings):
    """Show the relay: start 1 prefill and 1 decode worker, ask one question by HTTP and one by gRPC, keep serving."""

    log_level: LogLevel = "error"
    """The least important log records that are written."""


def refuse_unknown_variables(own: Collection[str], every: Callable[[], Collection[str]]) -> None:
    """Raise SettingError for a ``KVBATON_*`` variable that is no setting of any command: a typo sets nothing.

    own: names of this command's settings; every: those of all commands, asked only where ``own`` is not enough.
    """
    asked = {name[len(PREFIX) :].lower() for name in os.environ if name.upper().startswith(PREFIX)}
    if not (asked := asked - set(own)):
        return
    known = set(every())
    if unknown := sorted(asked - known):
        names = ", ".join(variable(name) for name in unknown)
        near = nearest(variable(unknown[0]), [variable(name) for name in known])
        raise SettingError(
            f"{names} in the environment is no setting of kvbaton{near}; see `kvbaton COMMAND --help`"
        )


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


def child_environment(
    settings: Mapping[str, object] | None = None, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return what a child process inherits: this environment over ``settings`` (by name), without the settings file.

    names: of the child's own settings. Other variables of ours, and whatever else is a secret by its name, are left out: a
    worker needs no client's key. None: for a process that is this one. The child gets what the file says by this, read
    once, and not the file. gRPC's own chatter is off unless it was asked for.
    """
    own = {name: value for name, value in os.environ.items() if name.upper() != variable("config")}
    if names is not None:
        wanted = {variable(name) for name in names}
        own = {name: value for name, value in own.items() if name.upper() in wanted or not _is_private(name)}
    taken = {name.upper() for name in own}
    given = {variable(name): _as_variable(value) for name, value in (settings or {}).items()}
    return {
        "GRPC_VERBOSITY": "ERROR",
        **{name: value for name, value in given.items() if name not in taken},
        **own,
    }


def _is_private(name: str) -> bool:
    return name.upper().startswith(PREFIX) or is_secret(name.lower())


def _as_variable(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def available_cores() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
