"""Steps with chunks in pieces: a recorder that repeats operations on their very tensors gives what eager steps give."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention.backend import create_backend
from engine.compute.forward import with_graphs
from engine.compute.forward_graphs import GraphedForward, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.compute.piecewise import PiecewiseGraphs, piece_sizes
from engine.connector import LayerWatch
from engine.models.language_model import LanguageModel
from engine.models.loading import LoadedModel, load
from engine.settings import EngineSettings
from tests.attention_cases import CPU, UNWRITTEN, Case
from tests.checkpoints import make_checkpoint
from tests.fakes.engine.graphs import RerunRecorder, StaticTorchBackend
from tests.fakes.engine.tape import TapeRecorder
from tests.graph_rig import CASE, MAX_LEN, NUM_BLOCKS

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
}
SIZES = [16, 32]
MIXED = replace(CASE, work=((3, 1), (0, 9), (17, 5), (30, 1)))


@cache
def model_of(family: str) -> LoadedModel:
    return load(make_checkpoint(Path(mkdtemp()), family, **FAMILIES[family]), "float32", None, CPU)


class Taped:
    """A model run eagerly, and with pieces by tape, each with its own pool; the rest of the pool is NaN."""

    def __init__(self, loaded: LoadedModel, sizes: Sequence[int] = SIZES) -> None:
        self.recorder = TapeRecorder()
        self.plain = PlainForward(loaded.model, create_backend("torch"), CASE.block_size, CPU)
        own = PlainForward(loaded.model, StaticTorchBackend(), CASE.block_size, CPU)
        self.graphed = GraphedForward(
            own, self.recorder, sizes=capture_sizes(6), max_model_len=MAX_LEN, piece_sizes=sizes
        )
        shape = (NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:])
        self.pools = [torch.full(shape, torch.nan) for _ in range(2)]
        self.caches = [list(pool.unbind(1)) for pool in self.pools]
        with torch.inference_mode():
            self.graphed.capture(self.caches[1])

    @property
    def replays(self) -> dict[int, int]:
        """The number of replays of each size, of those in pieces."""
        tapes = [tape for tape in self.recorder.tapes if tape.num_pieces > 1]
        return {len(tape.output): tape.num_replays for tape in tapes if tape.num_replays}

    def compare(self, case: Case, watch: LayerWatch | None = None) -> Tensor:
        """Run a step of both: states, logits and pools are equal. Return the states."""
        inputs = case.inputs(MAX_LEN)
        for pool in self.pools:
            pool[: case.num_blocks] = case.pool(inputs)
        with torch.inference_mode():
            expected = self.plain.forward(inputs, self.caches[0])
            states = self.graphed.forward(inputs, self.caches[1], watch)
            expected_logits, logits = self.plain.logits(expected), self.graphed.logits(states)
        torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
        assert logits.argmax(-1).tolist() == expected_logits.argmax(-1).tolist()
        torch.testing.assert_close(*self.pools, atol=1e-5, rtol=1e-4, equal_nan=True)
        assert not self.pools[1][0].any(), "the null block holds zeros"
        return states


@cache
def taped(family: str) -> Taped:
    return Taped(model_of(family))


WORK = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12) | st.just(1)), min_size=1, max_size=9
).filter(lambda work: sum(-(-sum(each) // CASE.block_size) + 1 for each in work) < NUM_BLOCKS)


@pytest.mark.parametrize("family", FAMILIES)
@given(work=WORK)
@example(work=[(0, 16)])
@example(work=[(0, 12), (3, 12), (8, 8)])
@example(work=[(0, 12), (3, 12), (8, 9)])
@example(work=[(3, 1)] * 9)
@settings(max_examples=30, deadline=None)
def test_any_step_equals_the_eager_one(family: str, work: list[tuple[int, int]]) -> None:
    """Each step follows others on the same tensors, so columns behind its tokens hold what those left there."""
    rig, case = taped(family), replace(CASE, work=tuple(work))
    before = rig.replays
    rig.compare(case)
    num_tokens = sum(count for _, count in work)
    is_decode = num_tokens == len(work) <= 8
    size = next((size for size in SIZES if size >= num_tokens and not is_decode), None)
    replayed = {size: rig.replays[size] - before.get(size, 0) for size in rig.replays}
    assert {size: count for size, count in replayed.items() if count} == ({size: 1} if size else {})


def test_pieces_are_one_more_than_layers() -> None:
    loaded = model_of("llama")
    tapes = [tape for tape in taped("llama").recorder.tapes if tape.num_pieces > 1]
    assert [len(tape.output) for tape in tapes] == [32, 16], "the largest first"
    assert {tape.num_pieces for tape in tapes} == {loaded.config.num_layers + 1}


def test_columns_without_a_token_hold_id_zero_and_store_nothing() -> None:
    """Also after a step that filled all of them."""
    loaded, recorder = model_of("qwen2"), RerunRecorder()
    model = SeenModel(loaded)
    plain = PlainForward(model, StaticTorchBackend(), CASE.block_size, CPU)
    pieces = PiecewiseGraphs(plain, recorder, [16])
    pool = torch.zeros(NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:])
    pieces.capture(list(pool.unbind(1)))
    for work in (((0, 16),), ((3, 1), (0, 9)), ((0, 2),)):
        inputs = replace(CASE, work=work).inputs(MAX_LEN)
        with torch.inference_mode():
            pieces.forward(inputs)
        ids, positions, places, num_cleared = model.seen[-1]
        count = inputs.num_tokens
        assert len(ids) == 16 and ids[:count] == inputs.input_ids.tolist()
        assert positions[:count] == inputs.positions.tolist()
        assert places[:count] == inputs.slot_mapping.tolist()
        assert ids[count:] == positions[count:] == num_cleared[count:] == [0] * (16 - count)
        assert places[count:] == [-1] * (16 - count)


class SeenModel(LanguageModel):
    """A model that notes the ids, positions, slots and cleared slots of each pass."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model = loaded.model
        self.seen: list[list[list[int]]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, step: Any, *rest: Any) -> Tensor:
        vectors = (input_ids, positions, step.slots.places, step.slots.num_cleared)
        self.seen.append([vector.tolist() for vector in vectors])
        states: Tensor = self.model(input_ids, positions, step, *rest)
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)


def test_the_states_of_a_step_outlast_the_next_one() -> None:
    """A pooled prompt is read when the next step runs already."""
    rig = taped("llama")
    first = rig.compare(MIXED)
    kept = first.clone()
    rig.compare(replace(CASE, work=((0, 11), (5, 1))))
    rig.compare(CASE)
    assert torch.equal(first, kept)


def test_a_watch_is_called_for_each_layer_when_its_kv_is_there() -> None:
    """It publishes KV while the step is computed; before attention, which takes most of a layer's time."""
    rig, inputs = taped("qwen3"), MIXED.inputs(MAX_LEN)
    last, seen = int(inputs.slot_mapping[-1]), list[tuple[int, list[bool]]]()

    class Watch:
        def on_stored(self, num_layers: int) -> None:
            keys = rig.pools[1][last // CASE.block_size, :, 0, :, last % CASE.block_size]
            seen.append((num_layers, [bool((key != UNWRITTEN).all()) for key in keys]))

        def on_computed(self) -> None:
            raise AssertionError("the runner calls this, not the model")

    assert model_of("qwen3").config.num_layers == 2
    rig.compare(MIXED, Watch())
    assert seen == [(1, [True, False, False]), (2, [True, True, False])]


def test_a_step_whose_tokens_are_fed_takes_them_from_the_device() -> None:
    """A decode that no graph has room for; its tokens are on the device only."""
    rig, case = taped("mistral"), replace(CASE, work=((3, 1),) * 9)
    inputs = case.inputs(MAX_LEN)
    for pool in rig.pools:
        pool[: case.num_blocks] = case.pool(inputs)
    unknown = replace(inputs, input_ids=inputs.input_ids * 0 - 1, fed=torch.tensor(inputs.input_ids).long())
    with torch.inference_mode():
        expected = rig.plain.forward(inputs, rig.caches[0])
        before = rig.replays.get(16, 0)
        states = rig.graphed.forward(unknown, rig.caches[1])
    assert rig.replays[16] == before + 1
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)


def test_sizes_end_at_the_first_that_holds_a_full_step() -> None:
    assert piece_sizes(2048) == [16, 32, 64, 128, 192, 256, 384, 512]
    assert piece_sizes(200) == [16, 32, 64, 128, 192, 256]
    assert piece_sizes(128) == [16, 32, 64, 128]
    assert piece_sizes(1) == [16]


def test_every_size_is_captured_before_memory_is_measured() -> None:
    """The driver takes memory for each graph beside torch's; a size that is captured again replaces its first graphs."""
    recorder = TapeRecorder()
    plain = PlainForward(model_of("llama").model, StaticTorchBackend(), CASE.block_size, CPU)
    graphed = GraphedForward(
        plain, recorder, sizes=capture_sizes(6), max_model_len=MAX_LEN, piece_sizes=SIZES
    )
    pool = torch.zeros(NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:])
    caches = list(pool.unbind(1))
    with torch.inference_mode():
        graphed.reserve([cache[:1] for cache in caches])
        assert [len(tape.output) for tape in recorder.tapes if tape.num_pieces > 1] == [32, 16]
        graphed.capture(caches)
        assert not pool.any(), "nothing is stored while graphs are captured"
        inputs = MIXED.inputs(MAX_LEN)
        graphed.forward(inputs, caches)
    pieces = [tape for tape in recorder.tapes if tape.num_pieces > 1]
    assert [tape.num_replays for tape in pieces] == [0, 0, 0, 1]
    assert pool[inputs.block_table[0, 0]].any(), (
        "it stores in the pool, not in the blocks of the first capture"
    )


@pytest.mark.parametrize(
    ("options", "kind", "has_pieces"),
    [
        ({"enforce_eager": True, "cudagraph_mode": "full_and_piecewise"}, PlainForward, False),
        ({"cudagraph_mode": "none"}, PlainForward, False),
        ({}, GraphedForward, False),
        ({"cudagraph_mode": "full_decode_only"}, GraphedForward, False),
        ({"cudagraph_mode": "full_and_piecewise"}, GraphedForward, True),
    ],
)
def test_the_settings_choose_what_is_captured(
    options: dict[str, Any], kind: type[Any], has_pieces: bool
) -> None:
    loaded, recorder = model_of("llama"), RerunRecorder()
    plain = PlainForward(loaded.model, StaticTorchBackend(), CASE.block_size, CPU)
    settings = EngineSettings(model=Path(), max_num_seqs=2, max_num_batched_tokens=20, **options)
    forward = with_graphs(plain, loaded, settings, recorder)
    assert type(forward) is kind
    pool = torch.zeros(NUM_BLOCKS, *CASE.pool(CASE.inputs()).shape[1:])
    forward.capture(list(pool.unbind(1)))
    assert [len(each.output) for each in recorder.pieces] == ([32, 16] if has_pieces else [])


def test_a_tape_is_as_strict_as_a_graph() -> None:
    """It keeps the numbers that Python had at the capture, and refuses what the host would have to wait for."""
    recorder, numbers = TapeRecorder(), iter(range(10))
    states = torch.zeros(2)
    tape = recorder.record(lambda: states + next(numbers))
    assert tape.output.tolist() == [1, 1], "it ran once before"
    states.fill_(5)
    tape.replay()
    assert tape.output.tolist() == [6, 6]
    with pytest.raises(AssertionError, match="a capture cannot read a tensor"):
        recorder.record(lambda: states * states.sum().item())
