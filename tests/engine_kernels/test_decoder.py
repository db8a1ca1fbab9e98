"""A forward pass by the kernels equals that of the plain decoder, for every family and every kind of batch."""

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contract.sampling import SamplingParams
from engine.attention.backend import create_backend
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.kernels.binding import Kernels
from engine.kernels.decoder import KernelDecoder, why_unserved
from engine.models.config import DecoderConfig
from engine.models.decoder import CausalLM
from engine.models.loading import LoadedModel, load
from engine.outputs import NewRequestData, SchedulerOutput
from tests.engine_kernels.conftest import MakeCheckpoint

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 81, 250
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "one head for all": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 5, "hidden_size": 160}),
    "window": ("mistral", {"sliding_window": 20}),
    "wide window": ("mistral", {"sliding_window": 130}),
    "qwen2": ("qwen2", {"head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 96}),
}
STEPS: list[dict[str, tuple[int, int]]] = [
    {"a": (0, 50), "b": (0, 1), "c": (0, 200), "d": (0, 3)},
    {"a": (50, 1), "b": (1, 40), "c": (200, 1), "d": (3, 13), "e": (0, 16)},
    {"a": (51, 1), "b": (41, 1), "c": (201, 1), "d": (16, 1), "e": (16, 1)},
    {"c": (202, 40), "d": (17, 1)},
]
"""Consecutive steps: request → (computed tokens, tokens in this step)."""


class Sequences:
    """Random tokens of some requests, and the ids of their blocks."""

    def __init__(self, block_size: int = BLOCK_SIZE) -> None:
        generator = np.random.default_rng(0)
        per_request = MAX_LEN // block_size + 1
        free = np.random.default_rng(1).permutation(np.arange(1, 5 * per_request + 1)).tolist()
        self.block_size, self.num_blocks = block_size, len(free) + 1
        self.tokens = {name: generator.integers(0, 256, MAX_LEN).tolist() for name in "abcde"}
        self.blocks = {name: [free.pop() for _ in range(per_request)] for name in "abcde"}

    def inputs(self, step: dict[str, tuple[int, int]]) -> PreparedInputs:
        """Return the inputs of a step that needs all final states."""
        scheduled = SchedulerOutput()
        for name, (computed, count) in step.items():
            known = self.tokens[name][: computed + count]
            scheduled.scheduled_new_reqs.append(
                NewRequestData(name, known, SamplingParams(), (self.blocks[name],), computed, len(known))
            )
            scheduled.num_scheduled_tokens[name] = count
        batch = InputBatch(len(step), MAX_LEN + self.block_size, self.block_size)
        batch.update(scheduled)
        inputs = prepare_inputs(batch, scheduled)
        return replace(inputs, num_wanted=inputs.num_scheduled_tokens)


def empty_pool(
    loaded: LoadedModel,
    dtype: torch.dtype = torch.bfloat16,
    num_blocks: int = NUM_BLOCKS,
    size: int = BLOCK_SIZE,
) -> list[Tensor]:
    """Return a pool of NaN, as if left by an earlier owner, with a zero null block. size: of a block."""
    config = loaded.config
    shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, size, config.head_dim)
    pool = torch.full(shape, torch.nan, dtype=dtype)
    pool[0] = 0
    return list(pool.unbind(1))


def plain_forward(loaded: LoadedModel, inputs: PreparedInputs, pool: list[Tensor] | None) -> Tensor:
    with torch.inference_mode():
        step = create_backend("torch").plan(inputs, BLOCK_SIZE, CPU)
        ids, positions = torch.from_numpy(inputs.input_ids), torch.from_numpy(inputs.positions)
        states: Tensor = loaded.model(ids, positions, step, pool)
        return states


class Pair:
    """The same checkpoint twice: computed by the kernels, and by torch in float32."""

    def __init__(
        self, folder: Path, kernels: Kernels, num_threads: int = 2, block_size: int = BLOCK_SIZE
    ) -> None:
        own = load(folder, "bfloat16", None, CPU)
        assert isinstance(own.model, CausalLM) and isinstance(own.config, DecoderConfig)
        self.config = own.config
        self.decoder = KernelDecoder(
            own.model,
            own.config,
            kernels,
            num_threads=num_threads,
            block_size=block_size,
            max_length=256,
        )
        self.exact = load(folder, "float32", None, CPU)
        self.rounding = load(folder, "bfloat16", None, CPU)
        self.pool = empty_pool(own)


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, checkpoint: MakeCheckpoint, kernels: Kernels) -> Any:
    family, overrides = MODELS[request.param]
    made = Pair(checkpoint(family, **overrides), kernels)
    yield made
    made.decoder.close()


def test_all_packed_weights_are_counted_once(
    checkpoint: MakeCheckpoint, kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights of every linear layer and of the output head, which is the embedding here."""
    caplog.set_level(logging.INFO)
    folder = checkpoint("qwen2", intermediate_size=2**15, tie_word_embeddings=True)
    pair = Pair(folder, kernels)
    pair.decoder.close()
    matrices = [weight for weight in pair.rounding.model.parameters() if weight.ndim == 2]
    num_bytes = sum(weight.nbytes for weight in matrices)
    assert num_bytes > 2**23
    assert any(line.startswith(f"packed weights: {num_bytes / 2**30:.2f} GiB in") for line in caplog.messages)


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def test_errors_are_no_larger_than_those_of_torch_in_bfloat16(pair: Pair) -> None:
    """Compared with float32, step by step in one pool; keys and values too. Unowned blocks are not touched."""
    sequences = Sequences()
    exact_pool, rounding_pool = empty_pool(pair.exact, torch.float32), empty_pool(pair.rounding)
    for step in STEPS:
        inputs = sequences.inputs(step)
        exact = plain_forward(pair.exact, inputs, exact_pool)
        rounded = plain_forward(pair.rounding, inputs, rounding_pool)
        found = pair.decoder.forward(inputs, pair.pool)
        assert distance(found, exact) < 1.25 * distance(rounded, exact) + 1e-3
        logits, exact_logits = pair.decoder.logits(found[-3:]), pair.exact.model.logits(exact[-3:])
        assert distance(logits, exact_logits) < 1.25 * distance(
            pair.rounding.model.logits(rounded[-3:]), exact_logits
        )
    for own, exact_layer in zip(pair.pool, exact_pool, strict=True):
        assert torch.equal(own.isnan(), exact_layer.isnan())
        assert distance(own.nan_to_num(), exact_layer.nan_to_num()) < 0.02


def test_chunking_and_batching_change_no_bit(pair: Pair) -> None:
    sequences = Sequences()
    whole = pair.decoder.forward(sequences.inputs({"c": (0, 230)}), pair.pool).clone()
    kept = [layer[sequences.blocks["c"]].clone() for layer in pair.pool]
    pool, found, cuts = empty_pool(pair.exact), [], (0, 1, 14, 77, 78, 79, 160, 229, 230)
    for number, (start, end) in enumerate(pairwise(cuts)):
        others = {"a": (0, number + 1)} if number % 2 else {}
        inputs = sequences.inputs({**others, "c": (start, end - start)})
        found.append(pair.decoder.forward(inputs, pool)[-(end - start) :].clone())
    assert torch.equal(torch.cat(found), whole)
    for layer, expected in zip(pool, kept, strict=True):
        assert torch.equal(layer[sequences.blocks["c"]].nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "num_wanted", [(1, 1, 1, 1), (0, 1, 1, 3), (50, 0, 0, 0), (0, 0, 200, 1), (3, 1, 70, 2), (0, 0, 0, 0)]
)
def test_the_choice_of_needed_states_changes_no_bit_of_them(pair: Pair, num_wanted: tuple[int, ...]) -> None:
    """Keys and values are equal too; the rows of other tokens may hold anything."""
    inputs, pool = Sequences().inputs(STEPS[0]), empty_pool(pair.exact)
    whole = pair.decoder.forward(inputs, pair.pool).clone()
    few = replace(inputs, num_wanted=np.array(num_wanted, dtype=np.int32))
    found = pair.decoder.forward(few, pool).clone()
    for end, count in zip(inputs.query_start_loc[1:], num_wanted, strict=True):
        assert torch.equal(found[end - count : end], whole[end - count : end])
    for layer, expected in zip(pool, pair.pool, strict=True):
        assert torch.equal(layer.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("block_size", [1, 5, 64, 256])
def test_the_size_of_blocks_changes_no_bit(
    checkpoint: MakeCheckpoint, kernels: Kernels, block_size: int
) -> None:
    folder, found = checkpoint("mistral", sliding_window=130), []
    for size in (BLOCK_SIZE, block_size):
        pair, sequences = Pair(folder, kernels, block_size=size), Sequences(size)
        pool = empty_pool(pair.exact, num_blocks=sequences.num_blocks, size=size)
        steps = [pair.decoder.forward(sequences.inputs(step), pool).clone() for step in STEPS]
        found.append(torch.cat(steps))
        pair.decoder.close()
    assert torch.equal(*found)


def test_a_profile_run_needs_no_pool(pair: Pair) -> None:
    inputs = Sequences().inputs({"a": (0, 30), "b": (0, 1)})
    nowhere = np.zeros_like(inputs.block_table)
    inputs = replace(inputs, block_table=nowhere, slot_mapping=np.zeros_like(inputs.slot_mapping))
    assert pair.decoder.forward(inputs, None).shape == (31, pair.config.hidden_size)


def test_nan_in_the_pool_reaches_the_answer(checkpoint: MakeCheckpoint, kernels: Kernels) -> None:
    """For keys and for values: the engine detects corrupt KV by its logits."""
    pair, sequences = Pair(checkpoint("llama"), kernels), Sequences()
    for half in (0, 1):
        pair.decoder.forward(sequences.inputs({"a": (0, 40)}), pair.pool)
        pair.pool[0][sequences.blocks["a"][1], half, 0, 3, 5] = torch.nan
        assert pair.decoder.forward(sequences.inputs({"a": (40, 1)}), pair.pool).isnan().any()
    pair.decoder.close()


class Watch:
    """A layer watch that records its calls and may fail."""

    def __init__(self, failing_at: int = 0) -> None:
        self.layers: list[int] = []
        self._failing_at = failing_at

    def on_stored(self, num_layers: int) -> None:
        self.layers.append(num_layers)
        if num_layers == self._failing_at:
            raise ValueError("the watch failed")

    def on_computed(self) -> None:
        """Do nothing."""


def test_a_watch_is_called_for_every_layer_and_its_error_is_raised(
    checkpoint: MakeCheckpoint, kernels: Kernels
) -> None:
    pair, inputs = Pair(checkpoint("llama"), kernels), Sequences().inputs({"a": (0, 20)})
    watch, failing = Watch(), Watch(failing_at=1)
    pair.decoder.forward(inputs, pair.pool, watch)
    assert watch.layers == [1, 2]
    with pytest.raises(ValueError, match="the watch failed"):
        pair.decoder.forward(inputs, pair.pool, failing)
    pair.decoder.close()


def test_a_running_pass_ends_before_the_threads(checkpoint: MakeCheckpoint, kernels: Kernels) -> None:
    """``close`` waits for a pass whose result is no longer needed, as when an engine fails."""
    pair = Pair(checkpoint("llama"), kernels)
    watch = Watch()
    pair.decoder.begin(Sequences().inputs({"a": (0, 200)}), pair.pool, watch)
    pair.decoder.close()
    assert watch.layers == [1, 2]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_interrupted_pass_can_be_computed_again(
    checkpoint: MakeCheckpoint, kernels: Kernels, num_threads: int
) -> None:
    """One thread always notices the interruption in time; with several the pass may be complete before."""
    pair, sequences = Pair(checkpoint("llama", num_hidden_layers=6), kernels, num_threads), Sequences()
    first, second = (sequences.inputs(step) for step in STEPS[1:3])
    whole_pool, no_cuts = empty_pool(pair.exact), Pair(checkpoint("llama", num_hidden_layers=6), kernels)
    for inputs in (sequences.inputs(STEPS[0]), first):
        pair.decoder.forward(inputs, pair.pool)
        no_cuts.decoder.forward(inputs, whole_pool)
    whole = no_cuts.decoder.forward(second, whole_pool)
    for _ in range(20):
        finish = pair.decoder.begin(second, pair.pool, may_be_interrupted=True)
        pair.decoder.interrupt()
        states = finish()
        assert states is None or (num_threads > 1 and torch.equal(states, whole))
    pair.decoder.interrupt()  # comes too late for that pass and must not affect the next one
    assert torch.equal(pair.decoder.forward(second, pair.pool), whole)
    for layer, expected in zip(pair.pool, whole_pool, strict=True):
        assert torch.equal(layer.nan_to_num(), expected.nan_to_num())
    pair.decoder.close()
    no_cuts.decoder.close()


def test_a_pass_that_may_not_be_interrupted_is_completed(
    checkpoint: MakeCheckpoint, kernels: Kernels
) -> None:
    pair = Pair(checkpoint("llama"), kernels, num_threads=1)
    finish = pair.decoder.begin(Sequences().inputs({"a": (0, 200)}), pair.pool, Watch())
    pair.decoder.interrupt()
    assert finish() is not None
    pair.decoder.close()


@pytest.mark.parametrize(
    ("dtype", "num_ranks", "overrides", "reason"),
    [
        ("bfloat16", 1, {}, None),
        ("float32", 1, {}, "float32 on cpu"),
        ("bfloat16", 2, {}, "2 ranks"),
        ("bfloat16", 1, {"head_dim": 16}, "head_dim is 16"),
        ("bfloat16", 1, {"intermediate_size": 100}, "intermediate_size is 100"),
    ],
)
def test_the_reason_is_given_if_the_kernels_cannot_compute_a_model(
    checkpoint: MakeCheckpoint,
    dtype: str,
    num_ranks: int,
    overrides: dict[str, int],
    reason: str | None,
) -> None:
    config = load(checkpoint("llama", **overrides), dtype, None, CPU).config
    assert isinstance(config, DecoderConfig)
    found = why_unserved(config, dtype, CPU, num_ranks)
    assert found is None if reason is None else reason in (found or "")
