"""Our own architectures by name: readers of the configuration, tensors and model, each imported at first use."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from engine.models.config import DecoderConfig, Head, RawConfig

if TYPE_CHECKING:
    from engine.distributed.group import RankGroup
    from engine.models.language_model import LanguageModel

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor of a checkpoint, by name."""


class _ReadConfig(Protocol):
    def __call__(self, raw: RawConfig) -> DecoderConfig: ...


class _Build(Protocol):
    def __call__(self, config: DecoderConfig, head: Head, group: "RankGroup") -> "LanguageModel": ...


class _Tensors(Protocol):
    def __call__(self, config: DecoderConfig, head: Head) -> Shapes: ...


@dataclass(frozen=True)
class Architecture:
    """The places of its parts as "module:name"; only the model's needs torch.

    config: a function of config.json. tensors: a function of the configuration. model: the model's class.
    """

    config: str
    tensors: str = "engine.models.families:decoder_tensors"
    model: str = "engine.models.decoder:CausalLM"

    def read_config(self, raw: RawConfig) -> DecoderConfig:
        """Return the decoder that config.json describes. Raises SettingError for one that cannot be served."""
        return cast(_ReadConfig, _found(self.config))(raw)

    def shapes(self, config: DecoderConfig, head: Head) -> Shapes:
        """Return the tensors that a checkpoint of this configuration has."""
        return cast(_Tensors, _found(self.tensors))(config, head)

    def build(self, config: DecoderConfig, head: Head, group: "RankGroup") -> "LanguageModel":
        """Build the model of one rank, without weights."""
        return cast(_Build, _found(self.model))(config, head, group)


ARCHITECTURES = {
    f"{family}{kind}": Architecture(f"engine.models.families:{family.lower()}")
    for kind in ("ForCausalLM", "Model")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
_FOR_TESTS = {
    "ScriptedForCausalLM": Architecture(
        "engine.testing.scripted_config:scripted_config",
        "engine.testing.scripted_config:scripted_tensors",
        "engine.testing.model:ScriptedModel",
    )
}


def architecture_name(raw: RawConfig) -> str | None:
    """Return the first of ``architectures`` in config.json, else None."""
    names = raw.get("architectures") or []
    return str(names[0]) if isinstance(names, list) and names else None


def find_architecture(raw: RawConfig) -> Architecture | None:
    """Return our architecture of that name, None for another one."""
    return (ARCHITECTURES | _FOR_TESTS).get(str(architecture_name(raw)))


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
