"""The base of every service's settings: flag over environment over file over default, with the same name in all of them.

``--max-num-seqs`` is ``KVBATON_MAX_NUM_SEQS`` is ``max_num_seqs``. A bad value stops the process with its name, its
value and the allowed range. Only modules named ``settings`` read the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, PrivateAttr
from pydantic_settings import BaseSettings, CliSuppress, PydanticBaseSettingsSource, SettingsConfigDict

from contract.addresses import check_address, check_http_address, check_listen_address
from contract.errors import SettingError
from contract.identity import MIN_SECRET_CHARACTERS
from contract.options import Options
from serving.private_files import read_private_text
from serving.settings_file import SettingsFile, is_secret

FLAG = "flag"
"""The origin of a value from the command line."""


Address = Annotated[str, AfterValidator(check_address)]
"""The "host:port" of another process."""
ListenAddress = Annotated[str, AfterValidator(check_listen_address)]
HttpAddress = Annotated[str, AfterValidator(check_http_address)]
"""A "host:port" to listen on; port 0 means any free port, an empty host all addresses of this machine."""


def listed(value: str) -> tuple[str, ...]:
    """Return the values of a setting of several, which commas separate."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def first_listed(value: str | None) -> str | None:
    """Return the first value of a setting of several; None if it has none."""
    return next(iter(listed(value or "")), None)


def check_addresses(value: str) -> str:
    """Check one or more "host:port", separated by commas. Raises ValueError if one is none."""
    names = listed(value)
    if not names:
        raise ValueError("it names no router; write HOST:PORT, or several of them separated by commas")
    return ",".join(map(check_address, names))


Addresses = Annotated[str, AfterValidator(check_addresses)]
"""One or more "host:port", separated by commas."""


def read_secret_file(path: Path | None) -> str:
    """Return the cluster secret in a file, without surrounding white space.

    Raises SettingError if there is none, if other users can read it, or if it is too short.
    """
    if path is None:
        raise SettingError("secret_file is not set; workers and router share one secret", param="secret_file")
    secret = read_private_text(path, "secret_file").strip()
    if not secret:
        raise SettingError(
            f"secret_file {path} is empty; make one with `openssl rand -hex 32`", param="secret_file"
        )
    check_secret(secret, f"secret_file {path}", "secret_file")
    return secret


def check_secret(secret: str, what: str, param: str) -> None:
    """Raise SettingError for a cluster secret that can be guessed offline or is not text.

    what: its name for the message, without its value.
    """
    try:
        secret.encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"{what} is not UTF-8 text", param=param) from error
    num_characters = sum(map(str.isprintable, secret))
    if num_characters < MIN_SECRET_CHARACTERS:
        raise SettingError(
            f"{what} has {num_characters} characters; a cluster secret needs at least {MIN_SECRET_CHARACTERS}:"
            " make one with `openssl rand -hex 32`",
            param=param,
        )


@dataclass(frozen=True)
class Sources:
    """The sources of settings. origins: by name FLAG, "KVBATON_NAME" or the place in the file; defaults have none."""

    origins: Mapping[str, str] = field(default_factory=dict)
    file: SettingsFile | None = None


class Settings(Options, BaseSettings):
    """Frozen settings whose errors name every unknown or invalid value. Subclasses add fields with help texts and ranges."""

    model_config = SettingsConfigDict(
        env_prefix="KVBATON_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    _sources: Sources = PrivateAttr(default_factory=Sources)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read no ``.env`` file and no folder of secrets: there are none, and to look for them takes time."""
        return init_settings, env_settings

    @property
    def sources(self) -> Sources:
        """The sources of the values; empty for settings that were made in code."""
        return self._sources

    def from_sources(self, sources: Sources) -> Self:
        """Return these settings with their sources. Checks nothing."""
        known = self.model_copy()
        known._sources = sources
        return known

    def masked(self) -> dict[str, Any]:
        """Return all settings for the log, with masked secrets."""
        return {
            name: "***" if is_secret(name) and value else value
            for name, value in self.model_dump(mode="json").items()
        }


class ProcessSettings(Settings):
    """The settings of a process that a supervisor may keep running."""

    num_restarts: CliSuppress[int] = Field(default=0, ge=0)
    """Number of earlier starts of the process by its supervisor; given by `kvbaton up`."""
