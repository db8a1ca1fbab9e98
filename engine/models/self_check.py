"""Check at start that a model of transformers computes the same over the paged KV cache as over its own attention.

Two short random prompts run side by side in three steps of uneven chunks, and every token's logits are compared with those
of one plain pass over each prompt. This finds results that depend on neighbours in a batch, on how a prompt is chunked, or
on KV outside the cache, before the first request arrives. It takes five forward passes over a few tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contract.sampling import SamplingParams
from engine.attention.backend import create_backend
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.models.config import ModelShape
from engine.models.language_model import LanguageModel
from engine.outputs import NewRequestData, SchedulerOutput

_STEPS = ((7, 3), (4, 5), (1, 1))
"""The number of tokens of each of the two prompts in each step."""
_LENGTHS = [sum(counts) for counts in zip(*_STEPS, strict=True)]
_BLOCK_SIZE = 4
_BLOCKS = ([3, 1, 5], [2, 6, 4])
_NUM_BLOCKS = 7
_FLOAT32_TOLERANCE = 1e-3
_HALF_TOLERANCE = 0.25
"""24 random layers come to 0.04, with experts to 0.11; what is computed wrongly lies near 1."""
_HALF_SHARE = 0.75
"""The share of tokens within the tolerance in 16 bits, in which rounding may send a token to another expert."""


@dataclass(frozen=True)
class Reference:
    """The prompts, and the logits ``[num_tokens, vocab_size]`` that transformers alone computes for them."""

    prompts: tuple[list[int], ...]
    logits: tuple[Tensor, ...]

    @classmethod
    def of(cls, whole: Any, vocab_size: int, device: torch.device) -> "Reference":
        """Compute the logits with transformers' eager attention and without a cache."""
        generator = torch.Generator().manual_seed(0)
        prompts = tuple(
            torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS
        )
        whole.set_attn_implementation("eager")
        logits = tuple(
            whole(input_ids=torch.tensor([prompt], device=device), use_cache=False).logits[0]
            for prompt in prompts
        )
        return cls(prompts, logits)


def difference(model: LanguageModel, shape: ModelShape, dtype: torch.dtype, reference: Reference) -> float:
    """Return the relative difference of the model's logits from the reference's; nan if they are not numbers.

    In float32 it is that of the worst token, in 16 bits the third quartile over tokens.
    """
    device = reference.logits[0].device
    cache_shape = (_NUM_BLOCKS, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
    caches = [torch.zeros(cache_shape, dtype=dtype, device=device) for _ in range(shape.num_layers)]
    backend = create_backend("torch")
    errors = []
    computed = [0] * len(reference.prompts)
    for counts in _STEPS:
        inputs = _inputs(reference.prompts, computed, counts)
        step = backend.plan(inputs, _BLOCK_SIZE, device)
        input_ids, positions = (
            torch.from_numpy(vector).to(device) for vector in (inputs.input_ids, inputs.positions)
        )
        logits = model.logits(model(input_ids, positions, step, caches))
        expected = [
            whole[start : start + count]
            for whole, start, count in zip(reference.logits, computed, counts, strict=True)
        ]
        errors.append(_relative(logits, torch.cat(expected)))
        computed = [start + count for start, count in zip(computed, counts, strict=True)]
    share = 1.0 if dtype == torch.float32 else _HALF_SHARE
    return float(torch.cat(errors).quantile(share))


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest ``difference`` that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE


def _inputs(prompts: Sequence[list[int]], computed: Sequence[int], counts: Sequence[int]) -> PreparedInputs:
    scheduled = SchedulerOutput()
    for name, prompt, blocks, start, count in zip("ab", prompts, _BLOCKS, computed, counts, strict=True):
        known = prompt[: start + count]
        scheduled.scheduled_new_reqs.append(
            NewRequestData(name, known, SamplingParams(), (blocks,), start, len(known))
        )
        scheduled.num_scheduled_tokens[name] = count
    batch = InputBatch(len(prompts), max(_LENGTHS), _BLOCK_SIZE)
    batch.update(scheduled)
    return prepare_inputs(batch, scheduled)


def _relative(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the difference per token; a common offset of all logits does not count, as it changes no probability."""
    ours, theirs = (each.float() - each.float().mean(-1, keepdim=True) for each in (logits, expected))
    errors: Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
    return errors
