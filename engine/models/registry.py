"""Architectures by name: the reader of the configuration and the model, each imported at first use."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from contract.errors import SettingError
from engine.distributed.group import RankGroup
from engine.models.config import DecoderConfig, RawConfig
from engine.models.language_model import Head, LanguageModel


class _ReadConfig(Protocol):
    def __call__(self, raw: RawConfig) -> DecoderConfig: ...


class _Build(Protocol):
    def __call__(self, config: DecoderConfig, head: Head, group: RankGroup) -> LanguageModel: ...


@dataclass(frozen=True)
class Architecture:
    """The places of both parts as "module:name". config: a function of config.json; model: the model's class."""

    config: str
    model: str = "engine.models.decoder:CausalLM"

    def read_config(self, raw: RawConfig) -> DecoderConfig:
        """Return the decoder that config.json describes. Raises SettingError for one that cannot be served."""
        return cast(_ReadConfig, _found(self.config))(raw)

    def build(self, config: DecoderConfig, head: Head, group: RankGroup) -> LanguageModel:
        """Build the model of one rank, without weights."""
        return cast(_Build, _found(self.model))(config, head, group)


ARCHITECTURES = {
    f"{family}{kind}": Architecture(f"engine.models.families:{family.lower()}")
    for kind in ("ForCausalLM", "Model")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_FOR_TESTS = {
    "ScriptedForCausalLM": Architecture(
        "engine.testing.model:scripted_config", "engine.testing.model:ScriptedModel"
    )
}


def architecture_name(raw: RawConfig) -> str | None:
    """Return the first of ``architectures`` in config.json, else None."""
    names = raw.get("architectures") or []
    return str(names[0]) if isinstance(names, list) and names else None


def find_architecture(raw: RawConfig) -> Architecture | None:
    """Return our architecture of that name, None for a decoder of transformers.

    Raises SettingError that lists the served names.
    """
    name = architecture_name(raw)
    found = (ARCHITECTURES | _FOR_TESTS).get(str(name))
    if found is None and not _is_of_transformers(name):
        missing = (
            ""
            if find_spec("transformers")
            else " (which is not installed: pip install 'kvbaton[transformers]')"
        )
        raise SettingError(
            f"the model's architecture is {name!r}; the served ones are {', '.join(ARCHITECTURES)}, and every "
            f"...ForCausalLM of transformers{missing}",
            param="model",
        )
    return found


def _is_of_transformers(name: str | None) -> bool:
    if name is None or find_spec("transformers") is None:
        return False
    is_decoder = cast(Callable[[str], bool], _found("engine.models.transformers_loading:is_decoder"))
    return is_decoder(name)


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
