"""Architecture name → how to read its configuration; a family's module is imported when it is asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from contract.errors import SettingError
from engine.models.config import DecoderConfig, RawConfig

ARCHITECTURES = {
    f"{family}{kind}": ("engine.models.families", family.lower())
    for kind in ("ForCausalLM", "Model")
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
}


def decoder_config(raw: RawConfig) -> DecoderConfig:
    """The decoder that ``architectures`` in config.json names. Raises SettingError that lists the served names."""
    names = raw.get("architectures") or []
    name = names[0] if isinstance(names, list) and names else None
    if name not in ARCHITECTURES:
        raise SettingError(
            f"the model's architecture is {name!r}; the served ones are {', '.join(ARCHITECTURES)}",
            param="model",
        )
    module, function = ARCHITECTURES[name]
    factory = cast(Callable[[RawConfig], DecoderConfig], getattr(import_module(module), function))
    return factory(raw)
