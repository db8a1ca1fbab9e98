"""A public model for tests whose answer its prompt contains, by real attention over the paged KV cache.

After the last ``answer`` token of the prompt it repeats the tokens that follow the last ``begin`` token, including the
end token of the message. A chat template that writes ``<begin>message<end><answer>`` therefore makes it answer with the
user's message, token by token: tool calls, reasoning, parts of characters.

Layer 0 finds the two tokens (keys and values: the position in bits, and whether it is one of them); layer 1 reads
the next token of the answer (key: the position in bits; value: the token's code). All numbers in the cache are 1 and -1,
exact in every dtype. Damaged KV is detected: the answer is the token ``lost`` if a mixed value is not clean, if a
head of layer 0 that takes the mean of all values finds another mean than these positions have (in float32 only), or
if there is no script. Not detected is damage in most of layer 0's keys and in layer 1's KV of tokens outside the
answer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from contract.errors import SettingError
from engine.attention.backend import AttentionStep, LayerShape, Steps, step_of
from engine.connector import LayerWatch
from engine.distributed.group import RankGroup
from engine.models.config import Head
from engine.models.language_model import LanguageModel
from engine.models.scripted_config import CODES, MARKERS, ScriptedConfig, ScriptTokens

_NUM_HEADS = 3
# Added to an attention score for each step by which a key is nearer to the intended one.
_GAIN = 8.0
_LOGIT_GAIN = 128.0
_CLEAN = 0.99
_SHAPE = LayerShape(scale=1.0, sliding_window=None)


def write_scripted_model(
    folder: Path, tokens: ScriptTokens, *, vocab_size: int, eos_token_id: int, max_model_len: int = 2048
) -> Path:
    """Write config.json and model.safetensors without a tokenizer; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    num_bits = (vocab_size - 1).bit_length()
    size = max(num_bits, max_model_len.bit_length() + len(("begin", "answer")))
    config = {
        "architectures": ["ScriptedForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": num_bits,
        "intermediate_size": 1,
        "num_hidden_layers": 2,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": size + size % 2,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": True,
        "eos_token_id": eos_token_id,
        "script_tokens": {name: getattr(tokens, name) for name in MARKERS},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    codes = _bits(torch.arange(vocab_size), num_bits).contiguous()
    save_file({CODES: codes}, folder / "model.safetensors")
    return folder


class ScriptedModel(LanguageModel):
    """The model of this module. Its only weights are the codes of the tokens."""

    def __init__(self, config: ScriptedConfig, head: Head, group: RankGroup) -> None:
        if group.size > 1:
            raise SettingError("the scripted model runs on one rank only", param="tensor_parallel_size")
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size)})
        self._config = config

    @property
    def _codes(self) -> Tensor:
        """The codes, ``[vocab_size, hidden_size]``."""
        return self.get_parameter(CODES)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: Steps,
        caches: Sequence[Tensor] | None,
        watch: LayerWatch | None = None,
    ) -> Tensor:
        """See LanguageModel. The hidden state is the code of the next token, zeros for ``lost``."""
        turns, is_clean = self._turns(input_ids, positions, _Layer(0, step_of(step, 0), caches, watch))
        code = self._read(turns, input_ids, positions, _Layer(1, step_of(step, 1), caches, watch))
        is_clean = is_clean & (code.abs() > _CLEAN).all(-1)
        return code * is_clean[:, None]

    def logits(self, states: Tensor) -> Tensor:
        """See LanguageModel."""
        logits = _LOGIT_GAIN * F.linear(states, self._codes)
        logits[:, self._config.tokens.lost] = _LOGIT_GAIN * (self._config.hidden_size - 0.5)
        return logits

    def _turns(self, input_ids: Tensor, positions: Tensor, layer: "_Layer") -> tuple[Tensor, Tensor]:
        """Compute layer 0: the position of the token that follows each one in the answer, and whether the KV was clean."""
        num_bits = self._config.position_bits
        tokens = self._config.tokens
        flags = torch.stack([input_ids == token for token in (tokens.begin, tokens.answer)], dim=-1)
        facts = self._vectors(_bits(positions, num_bits), 2.0 * flags - 1.0)
        later = _GAIN * 2.0 ** torch.arange(num_bits, device=facts.device)
        first = torch.eye(2, device=facts.device) * later.sum() * 1.5
        query = torch.cat([torch.cat([later.expand(2, -1), first], -1), later.new_zeros(1, num_bits + 2)])
        mixed = layer.attend(self._vectors(query).expand(len(facts), -1, -1), facts[:, None], facts[:, None])
        found = mixed[:, :2, : num_bits + 2]
        is_clean = (found.abs() > _CLEAN).flatten(1).all(-1)
        is_clean &= (found[:, 0, num_bits] > 0) & (found[:, 1, num_bits + 1] > 0)
        if facts.dtype == torch.float32:
            is_clean &= _are_all_there(mixed[:, 2, :num_bits], positions)
        begin, answer = _numbers(found[..., :num_bits]).unbind(1)
        return begin + 1 + positions - answer, is_clean & (begin < answer)

    def _read(self, turns: Tensor, input_ids: Tensor, positions: Tensor, layer: "_Layer") -> Tensor:
        """Compute layer 1: the code of the token at each turn; zeros, which are at position 0, if there is none."""
        num_bits = self._config.position_bits
        is_sink = (positions == 0)[:, None]
        key = self._vectors(_bits(positions, num_bits) * ~is_sink, 2.0 * is_sink - 1.0)
        code = F.embedding(input_ids, self._codes) * ~is_sink
        target = _bits(turns.clamp(0, 2**num_bits - 1), num_bits)
        sink = target.new_full((len(target), 1), (num_bits - 1) / 2)
        query = self._vectors(_GAIN * target, _GAIN * sink)[:, None]
        query = F.pad(query, (0, 0, 0, _NUM_HEADS - 1))
        mixed = layer.attend(query, key[:, None], self._vectors(code)[:, None])
        return mixed[:, 0, : self._config.hidden_size]

    def _vectors(self, *parts: Tensor) -> Tensor:
        """Concatenate the parts in the model's dtype, padded with zeros to the size of a head."""
        joined = torch.cat(parts, dim=-1).to(self._codes.dtype)
        return F.pad(joined, (0, self._config.head_dim - joined.shape[-1]))


@dataclass(frozen=True)
class _Layer:
    index: int
    step: AttentionStep
    caches: Sequence[Tensor] | None
    watch: LayerWatch | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store the KV of the tokens, report the layer to the watch, and attend."""
        cache = None if self.caches is None else self.caches[self.index]
        if cache is not None:
            self.step.store(key, value, cache)
        if self.watch is not None:
            self.watch.on_stored(self.index + 1)
        return self.step.attend(_SHAPE, query.contiguous(), key, value, cache)


def _bits(numbers: Tensor, num_bits: int) -> Tensor:
    """Return numbers ``[...]`` as 1 and -1, ``[..., num_bits]``, the lowest bit first."""
    places = torch.arange(num_bits, device=numbers.device)
    return (numbers[..., None].long() >> places & 1).float() * 2 - 1


def _numbers(bits: Tensor) -> Tensor:
    """Return the numbers that these bits represent; any number if the bits are not clean."""
    return ((bits > 0).long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def _are_all_there(means: Tensor, positions: Tensor) -> Tensor:
    """Return True where these are the means of the bits of all positions up to each one; one changed bit shows."""
    count = positions[:, None].long() + 1
    places = torch.arange(means.shape[-1], device=means.device)
    num_ones = (count >> places + 1 << places) + ((count & (2 << places) - 1) - (1 << places)).clamp(min=0)
    return ((means * count - (2 * num_ones - count)).abs() < 0.5).all(-1)
