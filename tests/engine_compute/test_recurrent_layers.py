"""Recurrent layers over slots of states: any chunks beside any others give transformers' own tokens, in any slot."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from contract.errors import InternalError
from contract.state_layout import StateLayout, StatePart
from engine.compute.forward import ForwardPass, forward_pass
from engine.compute.forward_plain import PlainForward
from engine.executor import InProcessExecutor
from engine.kv_cache.state_memory import StateMemory
from engine.models.loading import LoadedModel
from engine.models.recurrent_layers import StateStep, computes_by_token, key_of
from engine.models.served import examine
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy, write_checkpoint
from tests.engine_compute.driver import Driver
from tests.families.tiny_models import make_tiny

NOT_A_NUMBER = 0xFF
SHARED = [(37 * i + 11) % 256 for i in range(24)]
PROMPTS = {"a": [7], "b": [3, 1, 4, 1, 5], "c": [*SHARED, *range(60, 81)], "d": [*SHARED, *range(90, 107)]}
FAMILIES = ("lfm2", "qwen3_5_text", "mamba2", "jamba")
"""Short convolutions, gated delta nets, Mamba 2 without attention, Mamba 1."""
NUM_TOKENS = 8
LAYERS = ("Mixer", "GatedDeltaNet", "ShortConv")
_STATE = StateLayout((StatePart(layer=0, name="recurrent", shape=(3,), dtype="float32"),))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of each kind of recurrent layers."""
    torch.manual_seed(3)
    return write_checkpoint(tmp_path_factory.mktemp("model"), make_tiny(request.param), 3)


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), make_tiny("lfm2"), 3)


class SlotDriver(Driver):
    """All slots hold numbers that are none before a request has written them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, dtype="float32", kv_cache_bytes=1 << 25, max_num_seqs=4, **settings)
        memory = self.runner.regions.states
        assert memory is not None
        self.memory: StateMemory = memory
        self.memory.clear(NOT_A_NUMBER)

    def modules(self) -> Iterator[torch.nn.Module]:
        return self.runner._model.loaded.model.modules()

    def states_of(self, name: str) -> list[torch.Tensor]:
        """Return copies of what the slot of a request holds."""
        return [state[self._slots[name] - 1].clone() for state in self.memory.states.values()]

    def expected(self, folder: Path, num_tokens: int = NUM_TOKENS) -> dict[str, list[int]]:
        model = load_reference(folder)
        return {name: reference_greedy(model, prompt, num_tokens) for name, prompt in PROMPTS.items()}


def test_uneven_chunks_beside_decodes_equal_generate(folder: Path) -> None:
    """A request joins every other step, and each step computes other numbers of tokens of each."""
    driver = SlotDriver(folder, block_size=4)
    names: list[str] = []
    number = 0
    while len(names) < len(PROMPTS) or any(len(driver.sequences[name].answer) < NUM_TOKENS for name in names):
        if number % 2 == 0 and len(names) < len(PROMPTS):
            names.append(list(PROMPTS)[len(names)])
            driver.add(names[-1], PROMPTS[names[-1]])
        number += 1
        missing = {name: len(one.tokens) - one.num_computed for name, one in driver.sequences.items()}
        driver.step({name: min(count, 1 + (number * 5 + ord(name)) % 9) for name, count in missing.items()})
    found = {name: driver.sequences[name].answer[:NUM_TOKENS] for name in names}
    assert found == driver.expected(folder)
    driver.executor.shutdown()


def test_requests_that_continue_are_one_call_of_a_layer(folder: Path) -> None:
    """Their order is not that of their slots, and one of these between theirs is that of a request that waits."""
    driver = SlotDriver(folder)
    expected = driver.expected(folder)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
        driver.step({name: len(prompt)})
    sizes: list[int] = []
    layer = next(module for module in driver.modules() if type(module).__name__.endswith(LAYERS))
    projection = next(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
    hook = projection.register_forward_hook(lambda _, given, __: sizes.append(len(given[0])))
    for names in ("cab", "dca", "dcba", "ba"):
        waiting = {name: driver.states_of(name) for name in PROMPTS if name not in names}
        driver.step(dict.fromkeys(names, 1))
        assert sizes == [len(names)]
        sizes.clear()
        for name, before in waiting.items():
            assert all(map(torch.equal, before, driver.states_of(name)))
    hook.remove()
    assert driver.generate(list(PROMPTS), NUM_TOKENS) == expected
    driver.executor.shutdown()


def test_wrong_drafts_leave_the_states_of_the_right_ones(folder: Path) -> None:
    """Each step has drafts of another request, of which another number is right; all slots but the spare one are used."""
    driver = SlotDriver(folder, block_size=4, speculate="ngram")
    assert driver.memory.num_slots == len(PROMPTS) + 1
    expected = driver.expected(folder, 40)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    driver.step({name: len(prompt) for name, prompt in PROMPTS.items()})
    for number in range(16):
        name = list(PROMPTS)[number % 4]
        num_right = (number + number // 4) % 4
        num_known = len(driver.sequences[name].answer)
        drafts = expected[name][num_known : num_known + 3]
        drafts[num_right:] = [(token + 1) % 256 for token in drafts[num_right:]]
        driver.step({each: 1 + 3 * (each == name) for each in PROMPTS}, drafts={name: drafts})
        assert len(driver.sequences[name].answer) == num_known + 1 + num_right
    assert driver.generate(list(PROMPTS), 40) == expected
    driver.executor.shutdown()


def test_a_step_with_drafts_of_too_many_requests_is_refused(one_folder: Path) -> None:
    driver = SlotDriver(one_folder, speculate="ngram")
    for name in "ab":
        driver.add(name, PROMPTS[name])
    driver.step({name: len(PROMPTS[name]) for name in "ab"})
    with pytest.raises(InternalError, match="drafts of 2 requests, and there are 1 spare slots of states"):
        driver.step({"a": 2, "b": 2}, drafts={"a": [1], "b": [1]})
    driver.executor.shutdown()


def test_a_slot_that_is_used_again_is_not_read(folder: Path) -> None:
    """Its content is another client's. Here it is no number, so that one that is read would spoil all behind it."""
    driver = SlotDriver(folder)
    expected = driver.expected(folder)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
        assert driver.generate([name], NUM_TOKENS, 7)[name] == expected[name]
        driver.step({}, finished={name})
        driver._slots.clear()  # the next one gets the same slot
        for state in driver.memory.states.values():
            assert state[0].isfinite().all(), "the request has used this slot"
            state.fill_(float("nan"))
    driver.executor.shutdown()


def test_a_state_that_is_not_that_of_the_tokens_before_is_refused(one_folder: Path) -> None:
    """The state rule: a token that is computed twice would be absorbed twice."""
    driver = SlotDriver(one_folder)
    driver.add("a", PROMPTS["c"])
    driver.step({"a": 8})
    driver.sequences["a"].num_computed -= 1
    with pytest.raises(
        InternalError, match="'a' continues behind 7 tokens, and its state is that of 8 tokens"
    ):
        driver.step({"a": 2})
    driver.executor.shutdown()


def interrupted_forward(asked: list[bool], interrupts: list[bool]) -> Callable[..., ForwardPass]:
    """Return a pass that ends without results by the next of ``interrupts``; it records whether it might."""

    class Interrupted(PlainForward):
        def begin(self, *arguments: Any, may_be_interrupted: bool = False, **named: Any) -> Any:
            asked.append(may_be_interrupted)
            compute = super().begin(*arguments, may_be_interrupted=may_be_interrupted, **named)

            def computed() -> Any:
                hidden = compute()
                return None if interrupts and interrupts.pop() else hidden

            return computed

    def make(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> ForwardPass:
        plain = forward_pass(loaded, settings, device)
        assert isinstance(plain, PlainForward)
        return Interrupted(plain.model, plain.backend, plain.block_size, plain.device)

    return make


def driver_with(folder: Path, make: Callable[..., ForwardPass]) -> Driver:
    small: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 1 << 22, "max_num_seqs": 4}
    settings = EngineSettings(model=folder, dtype="float32", attention_backend="torch", **small)
    driver = Driver.__new__(Driver)
    driver.start(settings, InProcessExecutor(settings, make_forward=make))
    return driver


def test_a_step_with_states_is_not_interrupted(one_folder: Path, tmp_path: Path) -> None:
    """The layers before the interruption would absorb the tokens twice. With KV alone, a decode may be interrupted."""
    for folder, may in ((one_folder, False), (make_checkpoint(tmp_path, "llama"), True)):
        asked: list[bool] = []
        driver = driver_with(folder, interrupted_forward(asked, []))
        driver.add("a", PROMPTS["b"])
        asked.clear()
        driver.generate(["a"], 3)
        assert asked == [False, may, may]
        driver.executor.shutdown()


def test_a_step_that_was_interrupted_leaves_no_state(one_folder: Path) -> None:
    interrupts: list[bool] = []
    driver = driver_with(one_folder, interrupted_forward([], interrupts))
    driver.add("a", PROMPTS["b"])
    driver.step({"a": 5})
    interrupts.append(True)
    driver.step({"a": 1})
    driver.sequences["a"].num_computed -= 1
    with pytest.raises(InternalError, match="behind 5 tokens, and its state is that of an unfinished step"):
        driver.step({"a": 1})
    driver.executor.shutdown()


def test_steps_do_not_run_ahead_over_states(one_folder: Path, tmp_path: Path) -> None:
    """A step that ran ahead computes a token of an answer that may have ended."""

    def make(loaded: LoadedModel, settings: EngineSettings, device: torch.device) -> ForwardPass:
        plain = forward_pass(loaded, settings, device)
        assert isinstance(plain, PlainForward)
        plain.runs_ahead = True
        return plain

    for folder, runs_ahead in ((one_folder, False), (make_checkpoint(tmp_path, "llama"), True)):
        driver = driver_with(folder, make)
        assert driver.runner.runs_ahead is runs_ahead
        driver.executor.shutdown()


def test_slots_are_copied_with_what_they_have_absorbed() -> None:
    memory = StateMemory(_STATE, 3, torch.zeros(3 * _STATE.slot_bytes, dtype=torch.uint8))
    key = key_of(_STATE.parts[0])
    step = StateStep([1, 2], [0, 0], [4, 5], memory.states)
    memory.begin(step, ["a", "b"])
    memory.states[key][0] = 7.0
    memory.states[key][1] = 8.0
    memory.finishing(step, lambda: torch.zeros(1))()
    memory.copy([(1, 3), (2, 1)])
    assert memory.states[key][:, 0].tolist() == [8.0, 8.0, 7.0]
    memory.begin(StateStep([1, 3], [5, 4], [1, 1], memory.states), ["b", "c"])


def test_a_new_text_may_start_in_a_slot_of_an_unfinished_step() -> None:
    memory = StateMemory(_STATE, 1, torch.zeros(_STATE.slot_bytes, dtype=torch.uint8))
    for _ in range(2):
        memory.begin(StateStep([1], [0], [4], memory.states), ["a"])


def test_mamba_1_computes_one_token_at_a_time() -> None:
    """Its layers do not pass a state that exists to their scan."""
    by_token = {
        family: {
            computes_by_token(module)
            for module in make_tiny(family).modules()
            if type(module).__name__.endswith(LAYERS)
        }
        for family in ("mamba", "jamba", "mamba2", "qwen3_5_text", "lfm2")
    }
    assert by_token == {
        "mamba": {True},
        "jamba": {True},
        "mamba2": {False},
        "qwen3_5_text": {False},
        "lfm2": {False},
    }


def test_the_check_knows_models_with_states(one_folder: Path, tmp_path: Path) -> None:
    """Only layers with attention have KV."""
    served = examine(one_folder)
    assert served.has_states
    assert served.is_tried
    assert served.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # two of four layers
    alone = examine(write_checkpoint(tmp_path, make_tiny("mamba2"), 3))
    assert (alone.has_states, alone.kv_bytes_per_token, alone.max_model_len) == (True, 0, 8192)
    assert not examine(make_checkpoint(tmp_path / "llama", "llama")).has_states
