"""The settings of the commands that use a model once: they ask a running service, or one of their own."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from contract.errors import SettingError
from launch.settings import DEMO, CommandSettings, LocalSettings, LogLevel
from serving.settings import FLAG, Address


def _as_url(value: str) -> str:
    url = value if "://" in value else f"http://{value}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest or any(character.isspace() for character in url):
        raise ValueError("it must be http://HOST:PORT, https://HOST or HOST:PORT")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_as_url)]
"""Where a service listens; HOST:PORT is taken as http://HOST:PORT."""


class ClientSettings(LocalSettings):
    """The settings of commands that ask a model: of the service at --url, or without one of their own on free ports."""

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
    """The sampling settings of commands that ask questions of their own."""

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
