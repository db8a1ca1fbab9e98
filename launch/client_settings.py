"""The settings of the commands that use a running service: clients, which may start their own, and operators.

Operators' commands use the admin API of the routers.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress, SettingsConfigDict

from contract.errors import SettingError
from contract.options import MAX_SECONDS
from engine.options import NumberOptions, RankOptions
from launch.settings import DEMO, CommandSettings, LocalSettings, LogLevel
from serving.settings import FLAG, Address, Addresses, ListenAddress

_USEFUL_WITH_URL = frozenset({"served_model_name", "config", "log_level"})


class OperatorSettings(CommandSettings):
    """The routers, and the key for them."""

    admin: Addresses | None = None
    """HOST:PORT of the routers' admin ports, separated by commas; a name may stand for several routers. Unset: those of all
    routers in the ready file."""
    ready_file: Path | None = None
    """File that a running `kvbaton up --ready-file FILE` has written."""
    admin_key: str | None = Field(default=None, repr=False)
    """Admin key of the routers. Not accepted as a flag, which other users of this machine can see."""
    as_json: bool = False
    """Print JSON; short form: --json."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""


class WorkersSettings(OperatorSettings):
    """List the workers of a running service, let one drain, serve again or take another role, or reload something in all.

    A worker is named by its id, or by the beginning of it. A worker that drains takes no new requests. Those that it has end
    there, or at the deadline on other workers. Its process keeps running. A worker that takes another role drains first.

    Examples:
      kvbaton workers --admin 127.0.0.1:9101
      kvbaton workers --ready-file ready.json --json
      kvbaton workers drain decode-0 --deadline 60 --ready-file ready.json
      kvbaton workers undrain decode-0 --ready-file ready.json
      kvbaton workers flip decode-1 prefill --ready-file ready.json
      kvbaton workers reset-prefix-cache --ready-file ready.json
      kvbaton workers reload-weights --ready-file ready.json
    """

    action: CliPositionalArg[
        Literal["list", "drain", "undrain", "flip", "reset-prefix-cache", "reload-weights"]
    ] = "list"
    """The action."""
    worker: CliPositionalArg[str] = ""
    """Id of the worker of the action, or the beginning of it."""
    role: CliPositionalArg[Literal["", "prefill", "decode", "both"]] = ""
    """Role that the worker takes, with flip."""
    deadline_seconds: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    """Time for the requests of a worker that drains; unset: the worker's own drain_seconds; short form: --deadline. With
    reload-weights: the time in which all running requests must end; unset: 60."""
    wait: bool = True
    """Wait until the worker that drains holds nothing any more, or has taken its role."""

    @model_validator(mode="after")
    def _check_action(self) -> "WorkersSettings":
        is_of_all = self.action in ("list", "reset-prefix-cache", "reload-weights")
        if is_of_all and self.worker:
            raise ValueError(f"worker is {self.worker!r}, but {self.action} is always of all workers")
        if not is_of_all and not self.worker:
            raise ValueError(
                f"worker is not given: name the worker, as in `kvbaton workers {self.action} decode-0`"
            )
        if (self.action == "flip") is not bool(self.role):
            raise ValueError(
                f"role is {self.role!r}: flip needs a role, and nothing else takes one, as in"
                " `kvbaton workers flip decode-1 prefill`"
            )
        return self

    def refuse_useless_flags(self) -> None:
        """Raise SettingError for flags about a drain with another action."""
        flags = {name for name, origin in self.sources.origins.items() if origin == FLAG}
        used_by = {
            "drain": {"deadline_seconds", "wait"},
            "flip": {"wait"},
            "reload-weights": {"deadline_seconds"},
        }
        used = used_by.get(self.action, set())
        if useless := sorted(flags & {"deadline_seconds", "wait"} - used):
            raise SettingError(
                f"{useless[0]} has no effect on {self.action!r}; it belongs to `kvbaton workers drain WORKER`",
                param=useless[0],
            )


class ListSettings(WorkersSettings):
    """List the workers of a running service, of all its routers.

    Examples:
      kvbaton workers list --admin 127.0.0.1:9101
      kvbaton workers list --ready-file ready.json --json
    """

    action: CliSuppress[Literal["list"]] = "list"
    worker: CliSuppress[str] = ""
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    deadline_seconds: CliSuppress[float | None] = None
    wait: CliSuppress[bool] = True


class DrainSettings(WorkersSettings):
    """Let a worker take no new requests, and wait until it holds none.

    Those that it has end there, or at the deadline on other workers. Its process keeps running.

    Examples:
      kvbaton workers drain decode-0 --ready-file ready.json
      kvbaton workers drain decode-0 --deadline 60 --no-wait --admin 127.0.0.1:9101
    """

    action: CliSuppress[Literal["drain"]] = "drain"
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""


class UndrainSettings(WorkersSettings):
    """Let a worker that drains serve again.

    Example: kvbaton workers undrain decode-0 --ready-file ready.json
    """

    action: CliSuppress[Literal["undrain"]] = "undrain"
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    deadline_seconds: CliSuppress[float | None] = None
    wait: CliSuppress[bool] = True


class FlipSettings(WorkersSettings):
    """Let a worker take another role: it drains first, and its process keeps running.

    Example: kvbaton workers flip decode-1 prefill --ready-file ready.json
    """

    action: CliSuppress[Literal["flip"]] = "flip"
    deadline_seconds: CliSuppress[float | None] = None


class ResetPrefixCacheSettings(WorkersSettings):
    """Let all workers drop the KV that they keep for later prompts.

    A worker whose blocks are in use drops nothing; the error names it.

    Example: kvbaton workers reset-prefix-cache --ready-file ready.json
    """

    action: CliSuppress[Literal["reset-prefix-cache"]] = "reset-prefix-cache"
    worker: CliSuppress[str] = ""
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    deadline_seconds: CliSuppress[float | None] = None
    wait: CliSuppress[bool] = True


class ReloadWeightsSettings(WorkersSettings):
    """Let all workers read the weights of their model's folder again, without a restart.

    New requests wait meanwhile. Those that run end first: if they do not in time, nothing changes.

    Example: kvbaton workers reload-weights --deadline 120 --ready-file ready.json
    """

    action: CliSuppress[Literal["reload-weights"]] = "reload-weights"
    worker: CliSuppress[str] = ""
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    wait: CliSuppress[bool] = True


ACTIONS: dict[str, type[WorkersSettings]] = {
    "list": ListSettings,
    "drain": DrainSettings,
    "undrain": UndrainSettings,
    "flip": FlipSettings,
    "reset-prefix-cache": ResetPrefixCacheSettings,
    "reload-weights": ReloadWeightsSettings,
}
"""The settings by action. What an action does not take is hidden from its help, and refused when it is given."""


class TopSettings(OperatorSettings):
    """Show the workers of a running service, again and again, until Ctrl-C.

    With --json, each reading is one line of JSON.

    Examples:
      kvbaton top --admin 127.0.0.1:9101
      kvbaton top --ready-file ready.json --once --json
    """

    once: bool = False
    """Show one reading and exit."""
    interval_seconds: float = Field(default=1.0, ge=0.1, le=60)
    """Time between two readings."""


def _as_url(value: str) -> str:
    url = value if "://" in value else f"http://{value}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or any(character.isspace() for character in url):
        raise ValueError("use http://HOST:PORT, https://HOST or HOST:PORT")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_as_url)]
"""The URL of a service; HOST:PORT stands for http://HOST:PORT."""


class ClientSettings(LocalSettings):
    """The settings of client commands: they use the service at --url, or else start their own on free ports."""

    url: Url | None = None
    """URL of a running service (http://127.0.0.1:8000); unset: start a service for this command, and stop it afterwards."""
    api_key: str | None = Field(default=None, repr=False)
    """API key for the service at --url. Not accepted as a flag, which other users of this machine can see."""
    ca_file: Path | None = None
    """File of CA certificates (PEM) to trust for an https service at --url; unset: those of this machine."""
    http: ListenAddress = "127.0.0.1:0"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: ListenAddress = "127.0.0.1:0"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""

    @property
    def keeps_files(self) -> bool:
        """False: another service may use the folder that the environment names."""
        return False

    def refuse_contradictions(self) -> None:
        """Raise SettingError for flags about starting a service if --url names a running one."""
        if self.url is None:
            return
        flags = {name for name, origin in self.sources.origins.items() if origin == FLAG}
        useless = sorted((flags & LocalSettings.model_fields.keys()) - _USEFUL_WITH_URL)
        if useless:
            names = ", ".join(f"--{name.replace('_', '-')} {getattr(self, name)}" for name in useless)
            raise SettingError(
                f"url is {self.url}, a running service, so {names} would have no effect: remove one of the two"
                " (with --url, --served-model-name selects the model)",
                param=useless[0],
            )


class AskSettings(ClientSettings):
    """The sampling settings of commands that send prompts."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature; 0: always take the most likely token."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum number of new tokens; unset: up to the model's limit."""
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    """Seed of the sampling; unset: the router chooses one."""


class RunSettings(AskSettings):
    """Answer one prompt and exit.

    Uses the service at --url, or else starts the model on free ports for this one answer.

    Examples:
      kvbaton run "Who are you?"
      kvbaton run --url http://127.0.0.1:8000 "Who are you?"
    """

    prompt: CliPositionalArg[str]
    """The prompt."""
    raw: bool = False
    """Continue the prompt itself, without the model's chat template."""


class CheckSettings(NumberOptions, RankOptions, CommandSettings):
    """Describe a model folder and test its chat template; no weights are read.

    With the ranks of a worker or a group it shows the GPUs and the memory of these, and refuses what a start would.

    Exit codes: 0 no problem, 1 problems, 2 not a model folder.

    Examples:
      kvbaton check ~/models/Qwen3-8B
      kvbaton check --json ~/models/Qwen3-8B
      kvbaton check --dtype float32 --kv-cache-dtype bfloat16 ~/models/Qwen3-8B
      kvbaton check --data-parallel-size 4 ~/models/Qwen3-30B-A3B
    """

    model: CliPositionalArg[str] = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model in the package."""
    as_json: bool = False
    """Print one JSON object; short form: --json."""


class ChatSettings(AskSettings):
    """Chat in the terminal, with the service at --url or with a model that is started on free ports.

    Ctrl-C stops the answer, Ctrl-D or /exit leaves, /help lists the other commands. End a line with a backslash to
    continue the message on the next line. With piped input each line is one message.

    Examples:
      kvbaton chat
      kvbaton chat --url 127.0.0.1:8000 --temperature 0.7 --system "Answer in one sentence."
      echo "Who are you?" | kvbaton chat --url 127.0.0.1:8000
    """

    system: str | None = None
    """System message at the start of the conversation."""


class BatchSettings(ClientSettings):
    """Answer the requests of a file: one JSON object per line, in the format of OpenAI's Batch API.

    Uses the service at --url, or else starts the model for this batch, without HTTP. Answers are written as they arrive. A
    second run with the same files sends only the requests without an answer. Exit code: 0 all answered, 1 some not, 130
    Ctrl-C, 143 SIGTERM.

    Examples:
      kvbaton batch -i questions.jsonl -o answers.jsonl --model Qwen/Qwen2.5-0.5B-Instruct
      kvbaton batch -i questions.jsonl -o answers.jsonl --url http://127.0.0.1:8000
    """

    model_config = SettingsConfigDict(cli_shortcuts={"input": "i", "output": "o"})

    input: Path
    """Input file with one request per line: custom_id, method, url and body."""
    output: Path
    """Output file with one answer per line: id, custom_id, response and error."""
    max_concurrency: int = Field(default=64, ge=1)
    """Maximum number of concurrent requests."""
    max_retries: int = Field(default=10, ge=0)
    """Retries of a request after 429, 503 or a lost connection; each waits as long as the service requests."""

    def refuse_contradictions(self) -> None:
        """Raise SettingError for flags about starting a service beside --url, and for ports without it."""
        super().refuse_contradictions()
        flags = {name for name, origin in self.sources.origins.items() if origin == FLAG}
        if self.url is None and (useless := sorted(flags & {"http", "grpc", "ready_file"})):
            raise SettingError(
                f"{useless[0]} would have no effect: without --url, a batch opens no port for clients or operators;"
                " remove it",
                param=useless[0],
            )


class BenchSettings(ClientSettings):
    """Measure a service that nothing else uses, and write its timing model (docs/autoscaling.md).

    Uses the service at --url and its router's admin port, or else starts the model on free ports for this. It sends prompts
    of several lengths, and batches of several sizes, for some minutes.

    Examples:
      kvbaton bench --profile --model Qwen/Qwen2.5-0.5B-Instruct --output timing.json
      kvbaton bench --profile --url http://127.0.0.1:8000 --admin 127.0.0.1:9101
    """

    profile: bool = False
    """Measure the times of prompts, steps and transfers; no other benchmark is there."""
    output: Path = Path("timing.json")
    """File that is written."""
    longest_prompt: int = Field(default=1024, ge=64)
    """Tokens of the longest prompt."""
    rounds: int = Field(default=3, ge=1)
    """Repetitions of all measurements. Their medians count."""
    start_seconds: float | None = Field(default=None, gt=0, le=MAX_SECONDS)
    """Time from the order to start a worker to its first request; unset: measured, if the service is started for this, else
    60. An autoscaler measures later starts itself."""
    seed: int = 0
    """Seed of the prompts."""
    admin: Address | None = None
    """HOST:PORT of the admin port of a router of the service at --url."""
    admin_key: str | None = Field(default=None, repr=False)
    """Admin key of that router. Not accepted as a flag, which other users of this machine can see."""

    @model_validator(mode="after")
    def _check_profile(self) -> "BenchSettings":
        if not self.profile:
            raise ValueError("profile is not set: give --profile")
        if (self.url is None) is not (self.admin is None):
            raise ValueError(
                "url and admin belong together: the sizes of workers are read from the admin port"
            )
        return self
