"""Steps that begin before the tokens of the one before are read, on a device that is played by the host.

Its graphs overwrite what the step before has computed, and the host shows it no token ids that were sampled on it.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.compute import runner
from engine.core import EngineCore
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings
from tests.checkpoints import EOS_ID, make_checkpoint
from tests.drafting_engines import FreeSteps
from tests.engine_pair import running_pair
from tests.engine_scheduling.stepping import scheduler_of
from tests.fakes.engine.graphs import FakeDeviceForward, FakeDeviceGraphs, FakeDevicePieces
from tests.handover.handing_off import ping_pong

DEVICES = [FakeDeviceForward, FakeDeviceGraphs, FakeDevicePieces]
NUM_TOKENS = 40
SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 5, "ignore_eos": True}
MIXED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "short": {"temperature": 0.0, "ignore_eos": True, "max_tokens": 7},
    "seeded": SEEDED,
    "nucleus": {**SEEDED, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "logprobs": {**SEEDED, "logprobs": 3},
    "prompt logprobs": {**SEEDED, "prompt_logprobs": 1},
    "penalties": {**SEEDED, "presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "biased": {**SEEDED, "logit_bias": ((7, 4.0),), "allowed_token_ids": tuple(range(5, 90))},
    "least": {"temperature": 1.2, "seed": 8, "min_tokens": 20, "logit_bias": ((EOS_ID, 4.0),)},
    "grammar": {"temperature": 1.0, "seed": 3, "grammar": Grammar("regex", "[a-z]{3}(-[0-9]{2}){9}")},
    "grammar, greedy": {"temperature": 0.0, "grammar": Grammar("regex", "[a-f]{5,30}")},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


@dataclass
class Stepped:
    """An engine core that is stepped by the test. happened: the begin and the end of each step, by its number."""

    core: EngineCore
    woken: threading.Semaphore
    outputs: dict[str, list[EngineOutput]] = field(default_factory=dict)
    happened: list[tuple[str, int]] = field(default_factory=list)
    num_begun: int = 0

    def __post_init__(self) -> None:
        self._begin = self.core.executor.begin
        self.core.executor.begin = self.begin  # type: ignore[method-assign]

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        number = self.num_begun
        self.num_begun += 1
        self.happened.append(("begin", number))
        finish = self._begin(scheduled)

        def read() -> ModelRunnerOutput:
            self.happened.append(("read", number))
            return finish()

        return read

    def step(self, *, is_quiet: bool = True) -> None:
        for outputs in self.core.step(may_start_early=lambda: is_quiet).values():
            for output in outputs:
                self.outputs.setdefault(f"{output.request_id}.{output.choice}", []).append(output)

    def run(self) -> None:
        """Step until all requests have ended; wait for a grammar if nothing else is to be done."""
        while self.core.scheduler.has_unfinished_requests() or self.core.step_in_flight:
            if not self.core.step_in_flight and not self.core.needs_step():
                assert self.woken.acquire(timeout=30.0)
            self.step()
        self.core.call("check_integrity", [])

    def tokens(self) -> dict[str, list[int]]:
        return {
            name: [token for output in outputs for token in output.token_ids]
            for name, outputs in self.outputs.items()
        }

    def ends(self) -> dict[str, tuple[FinishReason | None, int | None]]:
        return {name: (own[-1].finish_reason, own[-1].stop_reason) for name, own in self.outputs.items()}

    def logprobs(self) -> dict[str, list[Any]]:
        return {
            name: [
                (entry.token_id, entry.rank, entry.top_token_ids, round(entry.logprob, 3))
                for output in outputs
                for entry in [*(output.logprobs or ()), *filter(None, output.prompt_logprobs or ())]
            ]
            for name, outputs in self.outputs.items()
        }


def requests() -> list[EngineRequest]:
    """Return mixed requests, one of them with three choices, and one with a stop token that it samples."""
    found = [
        EngineRequest(
            request_id=name,
            prompt_token_ids=[(11 * place + 7 * number) % 250 for place in range(3 + 5 * number)],
            sampling=SamplingParams(**{"max_tokens": NUM_TOKENS, **fields}),
            eos_token_ids=(EOS_ID,),
        )
        for number, (name, fields) in enumerate(MIXED.items())
    ]
    several = SamplingParams(max_tokens=NUM_TOKENS, **SEEDED)
    found.append(
        EngineRequest(request_id="several", prompt_token_ids=[9] * 21, sampling=several, num_choices=3)
    )
    return found


def engine(model: Path, device: type | None, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Stepped:
    """Return an engine on a fake device, or on the CPU (None)."""
    with monkeypatch.context() as patched:
        if device is not None:
            patched.setattr(runner, "forward_pass", device)
        fields = {"kv_cache_bytes": 8 * 2**20, "block_size": 4, "max_num_seqs": 16, "dtype": "float32"}
        woken = threading.Semaphore(0)
        whole = EngineSettings(model=model, **{**fields, **settings})
        return Stepped(EngineCore(whole, wake=woken.release), woken)


def fed(stepped: Stepped) -> list[bool]:
    """Return for each forward pass whether its tokens came from the device."""
    found: list[bool] = stepped.core.executor.runner._loaded.forward.fed  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_read(
    model: Path, device: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never a second one: one step is in flight at most."""
    stepped = engine(model, device, monkeypatch)
    stepped.core.add_request(requests()[0])
    stepped.run()
    last = NUM_TOKENS - 1
    assert stepped.happened == [
        ("begin", 0),
        *(event for number in range(last) for event in (("begin", number + 1), ("read", number))),
        ("read", last),
    ]
    assert fed(stepped)[-NUM_TOKENS:] == [False, *[True] * last]
    stepped.core.shutdown()


def test_input_that_waits_keeps_steps_from_running_ahead(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = engine(model, FakeDeviceGraphs, monkeypatch)
    stepped.core.add_request(requests()[0])
    for _ in range(3):
        stepped.step(is_quiet=False)
        assert not stepped.core.step_in_flight
    assert [name for name, _ in stepped.happened] == ["begin", "read"] * 3
    stepped.core.shutdown()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*MIXED, "several"])
def test_each_kind_of_request_gets_its_tokens(
    model: Path, device: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, so that nothing but its own kind could keep steps from running ahead; with equal log probabilities."""
    (request,) = [one for one in requests() if one.request_id == name]
    found = []
    for each in (None, device):
        stepped = engine(model, each, monkeypatch)
        stepped.core.add_request(request)
        stepped.run()
        found.append((stepped.tokens(), stepped.ends(), stepped.logprobs()))
        if each is not None:
            assert sum(fed(stepped)) >= stepped.num_begun - 4, "a prompt and its choices do not run ahead"
        stepped.core.shutdown()
    assert found[0] == found[1]
    assert all(len(tokens) > 5 for tokens in found[0][0].values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "crowded",
    [
        {},
        {"max_num_seqs": 5, "kv_cache_bytes": 2**18},
        {"max_num_seqs": 5, "kv_cache_bytes": 2**18, "scheduling_policy": "prefill-first"},
    ],
    ids=["roomy", "crowded", "prefill-first"],
)
def test_mixed_requests_get_the_tokens_of_the_cpu(
    model: Path, device: type, crowded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all, and with too few blocks and places, under both policies.

    One ends by a stop token, one is cancelled on the way.
    """
    reference = engine(model, None, monkeypatch)
    for request in requests():
        reference.core.add_request(request)
    reference.run()
    expected = reference.tokens()
    reference.core.shutdown()

    stopped = next(one for one in requests() if one.request_id == "seeded")
    token = expected["seeded.0"][17]
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, **SEEDED, "stop_token_ids": (token,), "logprobs": 1}
    prompt = stopped.prompt_token_ids
    stopping = EngineRequest(
        request_id="stopping", prompt_token_ids=prompt, sampling=SamplingParams(**fields)
    )
    stepped = engine(model, device, monkeypatch, **crowded)
    for request in [*requests(), stopping]:
        stepped.core.add_request(request)
    while not len(stepped.outputs.get("nucleus.0", ())) > 3:
        stepped.step()
    while stepped.core.step_in_flight:  # as the loop does when a message comes
        stepped.step(is_quiet=False)
    stepped.core.scheduler.abort_request("nucleus", None)
    stepped.run()
    found = stepped.tokens()
    cut = expected["seeded.0"].index(token) + 1
    assert found.pop("stopping.0") == expected["seeded.0"][:cut]
    assert stepped.ends()["stopping.0"] == (FinishReason.STOP, token)
    assert all(own[-1].is_leg_finished for own in stepped.outputs.values())
    cancelled = found.pop("nucleus.0")
    assert expected.pop("nucleus.0")[: len(cancelled)] == cancelled and 4 <= len(cancelled) < NUM_TOKENS
    assert found == expected
    assert any(fed(stepped))
    assert scheduler_of(stepped.core).pool.count_by_state()["held"] == 0
    stepped.core.shutdown()


def test_drafts_are_compared_for_requests_that_are_still_there(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request ends by a stop token while a step with it is ahead, and the one behind that removes it before it is read."""
    reference = engine(model, None, monkeypatch)
    greedy, _, seeded, *_ = requests()
    for request in (greedy, seeded):
        reference.core.add_request(request)
    reference.run()
    expected = reference.tokens()
    reference.core.shutdown()
    token = expected["seeded.0"][17]
    stepped = engine(model, FakeDeviceGraphs, monkeypatch, speculate="ngram")
    scheduler = scheduler_of(stepped.core)
    assert scheduler.batcher.drafting is not None
    scheduler.batcher.drafting.cost = FreeSteps()
    sampling = msgspec.structs.replace(seeded.sampling, stop_token_ids=(token,))
    for request in (greedy, msgspec.structs.replace(seeded, sampling=sampling)):
        stepped.core.add_request(request)
    while stepped.core.scheduler.has_unfinished_requests() or stepped.core.step_in_flight:
        for live in scheduler.requests.values():  # in doubt, and compared in each step
            live.drafts.num_misses = 9
            live.drafts.next_comparison = 0
        stepped.step()
    cut = expected["seeded.0"].index(token) + 1
    assert stepped.tokens() == {"greedy.0": expected["greedy.0"], "seeded.0": expected["seeded.0"][:cut]}
    assert sum(fed(stepped)) > NUM_TOKENS / 2, "steps run ahead"
    stepped.core.shutdown()


def test_rows_that_are_not_numbers_end_without_a_token(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 5: the request ends with an error, and the step that had begun with its token disturbs no other one."""
    expected = engine(model, None, monkeypatch)
    sane = requests()[2]
    expected.core.add_request(sane)
    expected.run()
    for device in DEVICES:
        stepped = engine(model, device, monkeypatch)
        sampling = SamplingParams(max_tokens=NUM_TOKENS, **SEEDED)
        sick = EngineRequest(request_id="sick", prompt_token_ids=[3, 4, 5], sampling=sampling)
        for request in (sane, sick):
            stepped.core.add_request(request)
        for _ in range(5):
            stepped.step()
        assert stepped.core.step_in_flight
        table = scheduler_of(stepped.core).pool.table_of("sick#0.0")
        stepped.core.executor.runner.memory.pool[table[0]] = math.nan  # type: ignore[attr-defined]
        stepped.run()
        assert stepped.outputs["sick.0"][-1].error_kind == "internal"
        assert len(stepped.tokens()["sick.0"]) in (5, 6)
        assert stepped.tokens()["seeded.0"] == expected.tokens()["seeded.0"]
        stepped.core.shutdown()
    expected.core.shutdown()


@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalties", "grammar"])
async def test_a_request_moves_between_engines_that_run_ahead(
    model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that are sent before the hand-over and after it are those of one engine that does not run ahead."""
    (request,) = [one for one in requests() if one.request_id == kind]
    reference = engine(model, None, monkeypatch)
    reference.core.add_request(request)
    reference.run()
    monkeypatch.setattr(runner, "forward_pass", FakeDeviceGraphs)
    async with running_pair(model, max_num_seqs=4) as pair:
        engines = [(pair.prefill, "boot-prefill"), (pair.decode, "boot-decode")]
        moving = await ping_pong(engines, request, num_tokens=5, num_moves=3)
        await pair.until_free()
    assert moving.tokens == reference.tokens()[f"{kind}.0"]
    reference.core.shutdown()


def test_it_can_be_turned_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stepped = engine(model, FakeDeviceGraphs, monkeypatch, enable_run_ahead=False)
    stepped.core.add_request(requests()[0])
    stepped.run()
    assert not any(fed(stepped)) and len(stepped.tokens()["greedy.0"]) == NUM_TOKENS
    stepped.core.shutdown()
