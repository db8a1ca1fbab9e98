"""Compare a model of transformers over the paged KV cache with transformers' own attention, before the first request.

Two short random prompts run side by side in three steps of uneven chunks, and every token's logits are compared with those
of one plain pass over each prompt. This finds results that depend on neighbours in a batch, on how a prompt is chunked, on
KV outside the cache, or on the former content of a slot of states. It takes five forward passes over a few tokens.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from contract.cache_layout import CacheLayout
from contract.layout import KVLayout
from contract.sampling import SamplingParams
from engine.attention.backend import create_backend
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.kv_cache.state_memory import StateMemory
from engine.models.attention_methods import choose_attention
from engine.models.config import ModelShape
from engine.models.language_model import LanguageModel
from engine.outputs import NewRequestData, SchedulerOutput

# The number of tokens of each of the two prompts in each step.
_STEPS = ((7, 3), (4, 5), (1, 1))
_LENGTHS = [sum(counts) for counts in zip(*_STEPS, strict=True)]
_BLOCK_SIZE = 4
_BLOCKS = ([3, 1, 5], [2, 6, 4])
_NUM_BLOCKS = 7
_FLOAT32_TOLERANCE = 1e-3
# 24 random layers come to 0.04, with experts to 0.11; what is computed wrongly lies near 1.
_HALF_TOLERANCE = 0.25
# The share of tokens within the tolerance in 16 bits, in which rounding may send a token to another expert.
_HALF_SHARE = 0.75
# In each byte of a number in 16 or 32 bits.
_NOT_A_NUMBER = 0xFF


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
        choose_attention(whole, "eager")
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
    caches = [
        torch.zeros(shape.cache_shape(_NUM_BLOCKS, _BLOCK_SIZE, layer), dtype=dtype, device=device)
        for layer in range(shape.num_layers)
    ]
    backend = create_backend("torch")
    # Of tables alone, whose blocks have no bytes.
    layout = KVLayout(num_layers=0, num_kv_heads=1, head_dim=1, block_size=_BLOCK_SIZE, dtype="float32")
    cache = CacheLayout.of(layout, [], shape.states)
    states = None
    if shape.states is not None:
        flat = torch.empty(len(_BLOCKS) * shape.states.slot_bytes, dtype=torch.uint8, device=device)
        memory = StateMemory(shape.states, len(_BLOCKS), flat)
        memory.clear(_NOT_A_NUMBER)  # a text must not read what a slot held before it
        states = memory.states
    errors = []
    computed = [0] * len(reference.prompts)
    for counts in _STEPS:
        inputs = replace(_inputs(cache, reference.prompts, computed, counts), states=states)
        step = backend.plan(inputs, _BLOCK_SIZE, device)
        input_ids, positions = (
            torch.from_numpy(vector).to(device) for vector in (inputs.input_ids, inputs.positions)
        )
        recurrent = model.recurrent
        with nullcontext() if recurrent is None else recurrent.during(inputs.state_step):
            hidden = model(input_ids, positions, step, caches)
        logits = model.logits(hidden)
        expected = [
            whole[start : start + count]
            for whole, start, count in zip(reference.logits, computed, counts, strict=True)
        ]
        # Without the mean: an offset that all logits share changes no probability.
        ours, theirs = (
            each.float() - each.float().mean(-1, keepdim=True) for each in (logits, torch.cat(expected))
        )
        errors.append((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1))
        computed = [start + count for start, count in zip(computed, counts, strict=True)]
    share = 1.0 if dtype == torch.float32 else _HALF_SHARE
    return float(torch.cat(errors).quantile(share))


def tolerance(dtype: torch.dtype) -> float:
    """Return the largest ``difference`` that rounding explains."""
    return _FLOAT32_TOLERANCE if dtype == torch.float32 else _HALF_TOLERANCE


def _inputs(
    cache: CacheLayout, prompts: Sequence[list[int]], computed: Sequence[int], counts: Sequence[int]
) -> PreparedInputs:
    scheduled = SchedulerOutput()
    of_requests = zip("ab", prompts, _BLOCKS, computed, counts, strict=True)
    for slot, (name, prompt, blocks, start, count) in enumerate(of_requests, 1):
        known = prompt[: start + count]
        tables = (blocks,) if cache.states is None else (blocks, [slot])
        scheduled.scheduled_new_reqs.append(
            NewRequestData(name, known, SamplingParams(), tables, start, len(known))
        )
        scheduled.num_scheduled_tokens[name] = count
    batch = InputBatch(len(prompts), max(_LENGTHS), _BLOCK_SIZE, cache)
    batch.update(scheduled)
    return prepare_inputs(batch, scheduled)
