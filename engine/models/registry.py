"""Our own architectures by name: readers of the configuration, tensors and model, each imported at first use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from contract.errors import SettingError
from engine.models.config import DecoderConfig, Head, OtherRopeError, RawConfig

if TYPE_CHECKING:
    from engine.distributed.group import RankGroup
    from engine.models.language_model import LanguageModel

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each tensor of a checkpoint, by name."""


@dataclass(frozen=True)
class Architecture:
    """The places of its parts as "module:name"; only the model's needs torch.

    config: a function of config.json. tensors: a function of the configuration. model: the model's class. may_fall_back:
    transformers computes what ``config`` refuses; without it, only other angles (OtherRopeError).
    """

    config: str
    tensors: str = "engine.models.families:decoder_tensors"
    model: str = "engine.models.decoder:CausalLM"
    may_fall_back: bool = False

    def read_config(self, raw: RawConfig) -> DecoderConfig:
        """Return the decoder that config.json describes. Raises SettingError for one that cannot be served."""
        return cast("Callable[[RawConfig], DecoderConfig]", _found(self.config))(raw)

    def shapes(self, config: DecoderConfig, head: Head) -> Shapes:
        """Return the tensors that a checkpoint of this configuration has."""
        return cast("Callable[[DecoderConfig, Head], Shapes]", _found(self.tensors))(config, head)

    def build(self, config: DecoderConfig, head: Head, group: "RankGroup") -> "LanguageModel":
        """Build the model of one rank, without weights."""
        build = cast("Callable[[DecoderConfig, Head, RankGroup], LanguageModel]", _found(self.model))
        return build(config, head, group)


_GENERATES = "ForCausalLM"
ARCHITECTURES = {
    f"{family}{kind}": Architecture(f"engine.models.families:{family.lower()}")
    for kind in (_GENERATES, "Model")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
ARCHITECTURES["Qwen3MoeForCausalLM"] = Architecture("engine.models.families:qwen3_moe", may_fall_back=True)
_FOR_TESTS = {
    "ScriptedForCausalLM": Architecture(
        "engine.models.scripted_config:read_config",
        "engine.models.scripted_config:scripted_tensors",
        "engine.models.scripted:ScriptedModel",
    )
}


def architecture_name(raw: RawConfig) -> str | None:
    """Return the first of ``architectures`` in config.json, else None."""
    names = raw.get("architectures") or []
    return str(names[0]) if isinstance(names, list) and names else None


def find_architecture(raw: RawConfig) -> Architecture | None:
    """Return our architecture of that name, None for another one, and where only transformers can compute this model."""
    name = str(architecture_name(raw))
    found = (ARCHITECTURES | _FOR_TESTS).get(name)
    if found is None:
        return None
    try:
        found.read_config(raw)
    except OtherRopeError:
        if name.endswith(_GENERATES) and find_spec("transformers"):
            return None
    except SettingError:
        if found.may_fall_back:
            return None
    return found


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
