"""Captured and replayed decode steps: sizes, padding, and that a replay computes the newest step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.compute import begun_step, runner
from engine.compute.forward import ForwardPass
from engine.compute.forward_graphs import GraphedForward, StaticLogits, capture_sizes
from engine.compute.forward_plain import PlainForward
from engine.compute.inputs import PreparedInputs
from engine.connector import LayerWatch
from engine.executor import InProcessExecutor
from engine.kv_cache.sizing import MemoryReading
from engine.models.decoder import CausalLM
from engine.models.language_model import LanguageModel
from engine.models.loading import LoadedModel, load
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import Sampling, begin_sampling, draw_by_torch
from engine.settings import EngineSettings
from tests.attention_cases import CPU
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver
from tests.fakes.engine.graphs import FakeDeviceForward, RerunRecorder, StaticTorchBackend, StaticTorchDecode
from tests.graph_rig import CASE, MAX_LEN, Rig


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    make_checkpoint(tmp_path, "mistral", sliding_window=20)
    return Rig(load(tmp_path, "float32", None, CPU), StaticTorchBackend())


def test_capture_sizes() -> None:
    """A35: 1, 2, 4 and multiples of 8, up to the padded number of requests; from 256 on fewer of them, up to 8192."""
    assert capture_sizes(1) == [1]
    assert capture_sizes(3) == [1, 2, 4]
    assert capture_sizes(5) == [1, 2, 4, 8]
    assert len(capture_sizes(256)) == 35
    assert capture_sizes(256)[-1] == 256
    assert capture_sizes(300)[-4:] == [256, 272, 288, 304]
    assert capture_sizes(600)[-4:] == [512, 544, 576, 608]
    assert len(capture_sizes(1024)) == 35 + 16 + 16
    assert capture_sizes(8192) == capture_sizes(20_000) and capture_sizes(8192)[-1] == 8192


class FullDecode(StaticTorchDecode):
    """A static step with room for two requests' lengths of 16 and more tokens."""

    def refill(self, inputs: PreparedInputs) -> bool:
        return super().refill(inputs) and int((inputs.seq_lens > 16).sum()) <= 1


class FullBackend(StaticTorchBackend):
    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> StaticTorchDecode:
        return FullDecode(num_reqs, max_blocks, block_size, device)


def test_a_step_that_a_graph_has_no_room_for_runs_eagerly(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral", sliding_window=20)
    full = Rig(load(tmp_path, "float32", None, CPU), FullBackend())
    full.compare(replace(CASE, work=((1, 1), (30, 1), (7, 1))))
    assert full.replays() == {4: 1}
    long = replace(CASE, work=((20, 1), (30, 1), (7, 1)))
    inputs = long.inputs(MAX_LEN)
    for pool in full.pools:
        pool[: long.num_blocks] = long.pool(inputs)
    with torch.inference_mode():
        expected = full.plain.forward(inputs, full.caches[0])
        states = full.graphed.forward(inputs, full.caches[1])
        assert full.graphed.best_tokens(full.graphed.logits(states)) is None
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-4)
    assert full.replays() == {4: 1}
    full.compare(replace(CASE, work=((9, 1), (30, 1), (7, 1))))
    assert full.replays() == {4: 2}


def test_replays_equal_eager_steps(rig: Rig) -> None:
    """A34, A36, A37: any number of requests, a different step each time, in graphs of the next larger size."""
    for num_reqs in (6, 1, 5, 2, 3, 4, 6):
        rig.compare(replace(CASE, work=CASE.work[-num_reqs:]))
    assert rig.replays() == {8: 3, 4: 2, 2: 1, 1: 1}


class SeenModel(LanguageModel):
    """A model that notes the token ids and positions of each pass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.seen: list[list[list[int]]] = []

    def forward(self, input_ids: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        self.seen.append([input_ids.tolist(), positions.tolist()])
        states: Tensor = self.model(input_ids, positions, *rest)
        return states

    def logits(self, states: Tensor) -> Tensor:
        return self.model.logits(states)


def test_columns_without_a_request_hold_zeros(rig: Rig) -> None:
    """A36: also after a step that filled all of them, and beside tokens that are fed on the device."""
    model = SeenModel(rig.loaded.model)
    seen = Rig(rig.loaded, StaticTorchBackend(), model)
    full = (*CASE.work, (5, 1), (8, 1))
    for num_reqs in (8, 5, 6, 5):
        inputs = replace(CASE, work=full[:num_reqs]).inputs(MAX_LEN)
        for each in (inputs, replace(inputs, fed=torch.tensor(inputs.input_ids, dtype=torch.int64))):
            with torch.inference_mode():
                seen.graphed.forward(each, seen.caches[1])
            ids, positions = model.seen[-1]
            assert len(ids) == len(positions) == 8
            assert ids[:num_reqs] == inputs.input_ids.tolist() != [0] * num_reqs
            assert positions[:num_reqs] == inputs.positions.tolist()
            assert ids[num_reqs:] == positions[num_reqs:] == [0] * (8 - num_reqs)


@pytest.mark.parametrize("max_num_seqs", [1, 6, 256])
def test_the_profile_takes_the_memory_of_a_full_batch(tmp_path: Path, max_num_seqs: int) -> None:
    """D8: ``max_num_seqs`` requests, all tokens of a step together; their logits are computed, and their tokens sampled."""
    made: list[ProfiledForward] = []

    def make(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> ForwardPass:
        made.append(ProfiledForward(loaded, settings, device))
        return made[0]

    settings = EngineSettings(model=make_checkpoint(tmp_path, "llama"), max_num_seqs=max_num_seqs)
    executor = InProcessExecutor(settings, make_forward=make)
    executor.collective_rpc("determine_available_memory")
    executor.shutdown()
    (profiled,) = made[0].profiled
    longest = executor.model_info.max_model_len
    assert profiled.num_reqs == max_num_seqs
    assert profiled.num_tokens == min(512, max_num_seqs * longest), "all that the host's profile runs"
    assert made[0].num_rows == [max_num_seqs]
    assert made[0].num_drawn == [max_num_seqs]


class ProfiledForward(FakeDeviceForward):
    """Notes the steps that have no place in the KV cache, and the rows for which logits and tokens are computed."""

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> None:
        super().__init__(loaded, settings, device)
        self.profiled: list[PreparedInputs] = []
        self.num_rows: list[int] = []
        self.num_drawn: list[int] = []
        self.draw = self._draw

    def _draw(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        self.num_drawn.append(len(rows))
        return draw_by_torch(scores, rows)

    def forward(
        self, inputs: PreparedInputs, caches: Sequence[Tensor] | None, watch: LayerWatch | None = None
    ) -> Tensor:
        if caches is None:
            self.profiled.append(inputs)
        return super().forward(inputs, caches, watch)

    def logits(self, states: Tensor) -> Tensor:
        self.num_rows.append(len(states))
        return super().logits(states)


def test_other_steps_run_eagerly(rig: Rig) -> None:
    """A34: chunks, and more requests than the largest graph holds, run eagerly."""
    rig.compare(replace(CASE, work=((3, 1), (0, 9))))
    rig.compare(replace(CASE, work=((3, 1),) * 9))
    assert rig.replays() == {}


def test_a_step_with_a_layer_watch_runs_eagerly(rig: Rig) -> None:
    """A layer watch is notified of each layer, as needed to publish KV while it is computed."""
    inputs, watch = CASE.inputs(MAX_LEN), LayerRecorder()
    rig.pools[1][: CASE.num_blocks] = CASE.pool(inputs)
    with torch.inference_mode():
        rig.graphed.forward(inputs, rig.caches[1], watch)
    assert watch.layers == [1, 2]
    assert rig.replays() == {}


class LayerRecorder:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def on_stored(self, num_layers: int) -> None:
        self.layers.append(num_layers)

    def on_computed(self) -> None:
        raise AssertionError("the runner calls this, not the model")


def test_a_rank_captures_graphs_on_its_pool_and_replays_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A15: capture follows the allocation and uses the pool's own layers, which are zero afterwards; answers are equal."""
    folder, recorder = make_checkpoint(tmp_path, "llama", seed=11), RerunRecorder()
    prompts = {"a": [5, 34, 63], "b": [92] * 7, "c": list(range(20))}
    driver = Driver(folder, max_num_seqs=6)
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    expected = driver.generate(list(prompts), 8)

    monkeypatch.setattr(runner, "forward_pass", partial(graphed_forward, recorder))
    driver = Driver(folder, max_num_seqs=6)
    assert len(recorder.recordings) == 1 + len(capture_sizes(6)), (
        "the largest is captured before, to be measured"
    )
    assert not driver.runner.memory.pool.any()
    for name, prompt in prompts.items():
        driver.add(name, prompt)
    sampled = []

    def count(logits: Tensor, *rest: Any) -> Sampling:
        sampled.append(logits)
        return begin_sampling(logits, *rest)

    monkeypatch.setattr(begun_step, "begin_sampling", count)
    assert driver.generate(list(prompts), 8) == expected
    assert len(sampled) == 1, "a replayed greedy step has its tokens, only the prompts' step samples"
    assert [recording.num_replays for recording in recorder.recordings] == [0, 0, 7, 0, 0]


def test_memory_of_graphs_is_taken_before_memory_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the pool is chosen with every static step, the logits and the largest graph in memory."""
    folder, recorder, seen = make_checkpoint(tmp_path, "llama"), RerunRecorder(), list[str]()
    planned = list[int]()
    plan_static = StaticTorchBackend.plan_static

    def plan(self: StaticTorchBackend, num_reqs: int, *rest: Any) -> StaticTorchDecode:
        planned.append(num_reqs)
        return plan_static(self, num_reqs, *rest)

    class Probe:
        def start(self) -> None:
            seen.append(f"start {planned} {len(recorder.recordings)}")

        def read(self) -> MemoryReading:
            seen.append(f"read {planned} {[len(each.output) for each in recorder.recordings]}")
            return MemoryReading(1 << 30, 1 << 30, 0, is_host=False)

    monkeypatch.setattr(StaticTorchBackend, "plan_static", plan)
    monkeypatch.setattr(runner, "forward_pass", partial(graphed_forward, recorder))
    settings = EngineSettings(model=folder, max_num_seqs=6, block_size=4)
    executor = InProcessExecutor(settings, Probe())
    executor.collective_rpc("determine_available_memory")
    assert seen == ["start [] 0", "read [8, 4, 2, 1] [8]"]
    executor.shutdown()


class Unchanged:
    """A head whose logits are the states."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def write_logits(self, states: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(states)


def test_a_row_that_is_not_a_number_has_no_best_token() -> None:
    """The others keep theirs."""
    logits = StaticLogits()
    logits.write(Unchanged(), torch.zeros(4, 5))
    logits.write(Unchanged(), torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, torch.nan]]).repeat(1, 2)[:, :5])
    assert logits.best_of(1).read().token_ids == [1]
    found = logits.best_of(2).read()
    assert (found.token_ids, found.num_nans) == ([1, None], [0, 1])


def test_best_tokens_are_those_of_their_step_although_the_next_one_overwrites_them() -> None:
    logits = StaticLogits()
    logits.write(Unchanged(), torch.eye(3))
    best = logits.best_of(3)
    logits.write(Unchanged(), torch.eye(3).flip(0))
    assert best.read().token_ids == [0, 1, 2]
    assert logits.best_of(3).read().token_ids == [2, 1, 0]


def graphed_forward(
    recorder: RerunRecorder, loaded: LoadedModel, settings: EngineSettings, device: torch.device
) -> GraphedForward:
    """Return the forward pass that ``forward_pass`` builds on a GPU."""
    assert isinstance(loaded.model, CausalLM)
    backend = StaticTorchBackend()
    plain = PlainForward(loaded.model, backend, settings.block_size, device)
    sizes = capture_sizes(settings.max_num_seqs)
    return GraphedForward(plain, recorder, sizes=sizes, max_model_len=loaded.info.max_model_len)


def test_nothing_is_captured_if_the_backend_has_no_static_steps(rig: Rig) -> None:
    recorder = RerunRecorder()
    graphed = GraphedForward(rig.plain, recorder, sizes=capture_sizes(6), max_model_len=MAX_LEN)
    graphed.reserve(rig.caches[0])
    graphed.capture(rig.caches[0])
    assert not recorder.recordings
    inputs = CASE.inputs(MAX_LEN)
    with torch.inference_mode():
        assert graphed.forward(inputs, rig.caches[0]).shape[0] == inputs.num_tokens
