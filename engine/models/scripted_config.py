"""The configuration of the model that answers by a script (``engine.models.scripted``). Needs no torch."""

from dataclasses import dataclass

from engine.models.config import DecoderConfig, Head, RawConfig, bad_config
from engine.models.families import read_shared_fields
from engine.models.registry import Shapes

CODES = "model.embed_tokens.weight"
"""The name of its only tensor."""
MARKERS = ("begin", "answer", "lost")


@dataclass(frozen=True, kw_only=True)
class ScriptTokens:
    """Token ids. begin: precedes the script. answer: precedes the answer. lost: the answer if no script can be read."""

    begin: int
    answer: int
    lost: int


@dataclass(frozen=True, kw_only=True)
class ScriptedConfig(DecoderConfig):
    """Two layers of one KV head; ``hidden_size`` is the number of bits of a token's code."""

    tokens: ScriptTokens

    @property
    def position_bits(self) -> int:
        """The number of bits of a position."""
        return self.max_position_embeddings.bit_length()


def read_config(raw: RawConfig) -> ScriptedConfig:
    """Read the configuration that ``write_scripted_model`` writes. Raises SettingError."""
    tokens = raw.get("script_tokens")
    if not isinstance(tokens, dict) or set(tokens) != set(MARKERS):
        raise bad_config(f"script_tokens is {tokens!r}; it must be an object of {', '.join(MARKERS)}")
    fields = read_shared_fields(raw)
    windows = (None,) * fields["num_layers"]
    return ScriptedConfig(**fields, sliding_windows=windows, tokens=ScriptTokens(**tokens))


def scripted_tensors(config: DecoderConfig, _head: Head) -> Shapes:
    """Return the tensors of its checkpoint."""
    return {CODES: (config.vocab_size, config.hidden_size)}
