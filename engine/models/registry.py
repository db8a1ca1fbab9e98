"""Architecture name → how to read its configuration, and the model; their modules are imported when they are asked for."""

from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from contract.errors import SettingError
from engine.models.config import DecoderConfig, RawConfig
from engine.models.language_model import Head, LanguageModel
from engine.ranks.group import RankGroup


class _ReadConfig(Protocol):
    def __call__(self, raw: RawConfig) -> DecoderConfig: ...


class _Build(Protocol):
    def __call__(self, config: DecoderConfig, head: Head, group: RankGroup) -> LanguageModel: ...


@dataclass(frozen=True)
class Architecture:
    """Where its two parts are found, as "module:name". config: a function of config.json; model: the model's class."""

    config: str
    model: str = "engine.models.decoder:CausalLM"

    def read_config(self, raw: RawConfig) -> DecoderConfig:
        """The decoder that config.json describes. Raises SettingError for what cannot be served."""
        return cast(_ReadConfig, _found(self.config))(raw)

    def build(self, config: DecoderConfig, head: Head, group: RankGroup) -> LanguageModel:
        """The model of one rank, without weights."""
        return cast(_Build, _found(self.model))(config, head, group)


ARCHITECTURES = {
    f"{family}{kind}": Architecture(f"engine.models.families:{family.lower()}")
    for kind in ("ForCausalLM", "Model")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_FOR_TESTS = {
    "ScriptedForCausalLM": Architecture(
        "engine.testing_model:scripted_config", "engine.testing_model:ScriptedModel"
    )
}


def find_architecture(raw: RawConfig) -> Architecture:
    """What ``architectures`` in config.json names. Raises SettingError that lists the served names."""
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    found = (ARCHITECTURES | _FOR_TESTS).get(str(name))
    if found is None:
        raise SettingError(
            f"the model's architecture is {name!r}; the served ones are {', '.join(ARCHITECTURES)}",
            param="model",
        )
    return found


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
