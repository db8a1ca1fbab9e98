"""One rank, step by step: which requests get a token, the order of events, dtypes, NaN, log probabilities."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from contract.errors import InternalError, SettingError
from contract.sampling import SamplingParams
from engine.attention.torch_backend import TorchStep
from engine.compute.runner import ModelRunner
from engine.connector import KVMemory, LayerWatch, SingleRankConnector
from engine.distributed.group import resolve_device
from engine.executor import create_executor
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.sampling.sampler import Sampling, begin_sampling
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver, add_cached, greedy

PROMPT = [(29 * i + 5) % 256 for i in range(21)]


class RecordingConnector:
    """A rank connector that records its calls, and which part of the pool was computed at each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.finished: tuple[set[str], set[str]] = (set(), set())
        self.memory: KVMemory | None = None

    def start(self, memory: KVMemory) -> None:
        self.memory = memory
        self.calls.append("start")

    def watch_layers(self, metadata: Any) -> LayerWatch | None:
        return self if metadata == "watch" else None

    def on_stored(self, num_layers: int) -> None:
        """Record the layers of block 1 that hold data."""
        assert self.memory is not None
        view, size = self.memory.read_view(1), self.memory.layout.num_layers
        step = view.nbytes // size
        computed = [layer for layer in range(size) if any(view[layer * step : (layer + 1) * step])]
        self.calls.append((num_layers, computed))

    def on_computed(self) -> None:
        self.calls.append("computed")

    def execute(self, metadata: Any) -> None:
        assert self.memory is not None
        self.calls.append((metadata, any(bytes(self.memory.read_view(1)))))

    def get_finished(self) -> tuple[set[str], set[str]]:
        finished, self.finished = self.finished, (set(), set())
        return finished

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", seed=11)


@pytest.mark.parametrize(
    ("max_length", "most", "counts"), [(256, 64, [2, 1]), (2, 64, [2]), (256, 1, [1, 1])]
)
def test_the_warm_up_computes_a_prompt_and_an_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, max_length: int, most: int, counts: list[int]
) -> None:
    """Otherwise the first answer waits for kernels to be compiled."""
    computed = list[int]()
    execute = ModelRunner.execute_model

    def counting(runner: ModelRunner, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(runner, scheduled)

    monkeypatch.setattr(ModelRunner, "execute_model", counting)
    driver = Driver(folder, max_model_len=max_length, max_num_batched_tokens=most, max_num_seqs=1)
    assert computed == [*counts, 0]
    assert not driver.runner.memory.pool.any()


def test_a_chunk_samples_no_token(folder: Path) -> None:
    """B8, A32: an unfinished prompt has an empty list; the decode beside it gets its token."""
    driver = Driver(folder)
    driver.add("short", PROMPT[:3])
    driver.step({"short": 3})
    driver.add("long", PROMPT)
    output = driver.step({"long": 8, "short": 1})
    assert output.req_ids == ["long", "short"]
    assert output.req_id_to_index == {"long": 0, "short": 1}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]
    output = driver.step({"long": 13})
    assert [len(tokens) for tokens in output.sampled_token_ids] == [1]


def test_a_step_without_tokens_runs_no_forward_pass(folder: Path) -> None:
    """B8, B19: the step still carries orders and completions."""
    driver, connector = Driver(folder), RecordingConnector()
    driver.executor.set_connector(SingleRankConnector(connector))
    connector.finished = ({"sent"}, {"got"})
    output = driver.executor.execute_model(SchedulerOutput(kv_connector_metadata="orders"))
    assert connector.calls == ["start", ("orders", False)]
    assert (output.finished_sending, output.finished_recving) == ({"sent"}, {"got"})
    assert output.req_ids == []
    output = driver.executor.execute_model(SchedulerOutput())
    assert (output.finished_sending, output.finished_recving) == (None, None)
    driver.executor.shutdown()
    driver.executor.shutdown()
    assert connector.calls[2:] == ["close"]


def test_a_connector_that_does_not_start_is_closed_once(folder: Path) -> None:
    class BrokenConnector(RecordingConnector):
        def start(self, memory: KVMemory) -> None:
            raise SettingError("no device", param="transports")

    driver, connector = Driver(folder), BrokenConnector()
    with pytest.raises(SettingError, match="no device"):
        driver.executor.set_connector(SingleRankConnector(connector))
    assert connector.calls == ["close"]
    driver.executor.shutdown()
    assert connector.calls == ["close"]


def test_orders_reach_the_connector_after_the_forward_pass(folder: Path) -> None:
    """B19: the results of a step are in the pool before the connector executes the step's orders."""
    driver, connector = Driver(folder), RecordingConnector()
    driver.executor.set_connector(SingleRankConnector(connector))
    driver.add("a", PROMPT)
    scheduled = SchedulerOutput(num_scheduled_tokens={"a": 21}, total_num_scheduled_tokens=21)
    driver.schedule(scheduled, "a", driver.sequences["a"], 21)
    scheduled.kv_connector_metadata = "publish"
    driver.executor.execute_model(scheduled)
    assert connector.calls == ["start", ("publish", True)]


def test_torch_on_the_host_computes_only_when_the_result_is_awaited(folder: Path) -> None:
    """``begin`` returns before the forward pass, so that other work is not delayed by it."""
    driver = Driver(folder)
    driver.add("a", PROMPT)
    scheduled = SchedulerOutput(num_scheduled_tokens={"a": 21}, total_num_scheduled_tokens=21)
    driver.schedule(scheduled, "a", driver.sequences["a"], 21)
    finish, pool = driver.executor.begin(scheduled), driver.executor.runner.memory.pool
    assert not pool.any()
    assert len(finish().sampled_token_ids[0]) == 1
    assert pool.any()


def test_a_layer_watch_is_called_when_the_kv_of_a_layer_is_stored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call precedes the layer's attention, which takes far longer than its KV."""
    driver, connector, attend = Driver(folder), RecordingConnector(), TorchStep.attend

    def attend_noted(step: TorchStep, *args: Any) -> Tensor:
        connector.calls.append("attend")
        return attend(step, *args)

    def sample_noted(*args: Any) -> Sampling:
        connector.calls.append("sample")
        return begin_sampling(*args)

    monkeypatch.setattr(TorchStep, "attend", attend_noted)
    monkeypatch.setattr("engine.compute.begun_step.begin_sampling", sample_noted)
    driver.executor.set_connector(SingleRankConnector(connector))
    driver.add("a", PROMPT)
    scheduled = SchedulerOutput(num_scheduled_tokens={"a": 21}, total_num_scheduled_tokens=21)
    driver.schedule(scheduled, "a", driver.sequences["a"], 21)
    scheduled.kv_connector_metadata = "watch"
    driver.executor.execute_model(scheduled)
    assert connector.calls[:3] == ["start", (1, [0]), "attend"]
    assert connector.calls[3:] == [(2, [0, 1]), "attend", "computed", "sample", ("watch", True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_half_precision_loads_and_runs(tmp_path: Path, family: str, dtype: str) -> None:
    folder = make_checkpoint(tmp_path, family, dtype=getattr(torch, dtype))
    driver = Driver(folder)
    assert driver.runner.model_info.dtype == driver.runner.memory.layout.dtype == dtype
    driver.add("a", PROMPT)
    driver.add("b", PROMPT[:5])
    answers = driver.generate(["a", "b"], 6, chunk=8)
    assert all(0 <= token < 264 for answer in answers.values() for token in answer)
    assert [len(answer) for answer in answers.values()] == [6, 6]


def test_seeded_answers_do_not_depend_on_chunking_or_batching(folder: Path) -> None:
    """Law 6: the position is absolute, so a replay of prompt + delivered tokens samples the same tokens."""
    sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=77, max_tokens=100)
    alone = Driver(folder)
    alone.add("a", PROMPT, sampling)
    answer = alone.generate(["a"], 12)["a"]
    crowd = Driver(folder)
    for index in range(3):
        crowd.add(f"other{index}", PROMPT[index : index + 4], SamplingParams(seed=index, max_tokens=100))
    crowd.add("a", PROMPT, sampling)
    assert crowd.generate(["other0", "a", "other1", "other2"], 12, chunk=5)["a"] == answer
    replay = Driver(folder)
    replay.add("a", PROMPT + answer[:5], sampling, num_prompt_tokens=len(PROMPT))
    assert replay.generate(["a"], 12)["a"] == answer
    other = Driver(folder)
    other.add("a", PROMPT, SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=78, max_tokens=100))
    assert other.generate(["a"], 12)["a"] != answer


def free_answer(folder: Path, count: int) -> list[int]:
    driver = Driver(folder)
    driver.add("a", PROMPT)
    return driver.generate(["a"], count)["a"]


def test_min_tokens_counts_only_the_answer(folder: Path) -> None:
    """The delivered tokens of a resumed request count, its prompt does not."""
    free = Driver(folder)
    free.add("a", PROMPT)
    answer = free.generate(["a"], 3)["a"]
    bound = Driver(folder)
    bound.add("a", PROMPT, greedy(min_tokens=2), eos_token_ids=(answer[0],))
    assert bound.generate(["a"], 1)["a"] != answer[:1]
    late = Driver(folder)
    late.add("a", PROMPT + answer[:1], greedy(min_tokens=1), eos_token_ids=(answer[1],), num_prompt_tokens=21)
    assert late.generate(["a"], 2)["a"] == answer[:2]


def test_penalties_count_prompt_and_answer_separately(folder: Path) -> None:
    """Delivered tokens of a replay belong to the answer; prompt tokens are only penalized by repetition_penalty."""
    sampling = greedy(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.2)
    whole = Driver(folder)
    whole.add("a", PROMPT, sampling)
    answer = whole.generate(["a"], 12)["a"]
    assert len(set(answer)) > len(set(free_answer(folder, 12)))
    replay = Driver(folder)
    replay.add("a", PROMPT + answer[:5], sampling, num_prompt_tokens=len(PROMPT))
    assert replay.generate(["a"], 12)["a"] == answer
    in_prompt = Driver(folder)
    in_prompt.add("a", PROMPT + answer[:5], greedy(frequency_penalty=2.0, presence_penalty=2.0))
    unpenalized = Driver(folder)
    unpenalized.add("a", PROMPT + answer[:5])
    assert in_prompt.generate(["a"], 1) == unpenalized.generate(["a"], 1)


def test_logprobs_are_in_the_row_of_their_request(folder: Path) -> None:
    """B9: in a batch with a chunk and with a request without log probabilities."""
    driver = Driver(folder)
    driver.add("chunk", PROMPT, greedy(logprobs=2))
    driver.add("asks", PROMPT[:4], greedy(logprobs=3))
    driver.add("does not", PROMPT[:5])
    output = driver.step({"chunk": 4, "asks": 4, "does not": 5})
    assert output.logprobs is not None
    assert [len(ids) for ids in output.logprobs.logprob_token_ids] == [0, 4, 0]
    assert output.logprobs.logprob_token_ids[1][0] == output.sampled_token_ids[1][0]
    assert output.logprobs.sampled_token_ranks[1] == 1
    assert driver.step({"does not": 1}).logprobs is None


def test_nan_is_counted_and_affects_only_its_request(folder: Path) -> None:
    """B8: num_nans_in_logits names the request; the others in the batch get their tokens."""
    driver, clean = Driver(folder), Driver(folder)
    for each in (driver, clean):
        each.add("sick", PROMPT)
        each.add("well", PROMPT[:6])
        each.step({"sick": 21, "well": 6})
    driver.runner.memory.pool[driver.sequences["sick"].blocks[0]] = torch.nan
    output = driver.step({"sick": 1, "well": 1})
    assert output.num_nans_in_logits == {"sick": 264}
    assert output.sampled_token_ids == [[], clean.step({"sick": 1, "well": 1}).sampled_token_ids[1]]


def test_blocks_with_stale_nan_are_safe_to_reuse(folder: Path) -> None:
    driver, clean = Driver(folder), Driver(folder)
    driver.runner.memory.pool[1:] = torch.nan
    for each in (driver, clean):
        each.add("a", PROMPT)
        each.add("b", PROMPT[:2])
    assert driver.generate(["a", "b"], 9, chunk=6) == clean.generate(["a", "b"], 9)


def test_preempted_request_is_computed_again(folder: Path) -> None:
    """B6: with new blocks, computed from 0, and all tokens sent again, the answer continues unchanged."""
    driver, clean = Driver(folder), Driver(folder)
    clean.add("a", PROMPT)
    answer = clean.generate(["a"], 8)["a"]
    driver.add("a", PROMPT)
    driver.generate(["a"], 3)
    sequence = driver.sequences["a"]
    tokens, blocks = list(sequence.tokens), [block + 50 for block in sequence.blocks]
    count = {"a": len(tokens)}
    scheduled = SchedulerOutput(num_scheduled_tokens=count, total_num_scheduled_tokens=len(tokens))
    add_cached(scheduled.scheduled_cached_reqs, "a", blocks, 0, resumed_with=tokens)
    output = driver.executor.execute_model(scheduled)
    assert output.sampled_token_ids == [[answer[3]]]
    sequence.tokens.append(answer[3])
    sequence.blocks, sequence.num_computed = blocks, len(tokens)
    assert driver.generate(["a"], 8)["a"] == answer


def test_use_before_startup_is_an_internal_error(folder: Path) -> None:
    runner = ModelRunner(EngineSettings(model=folder))
    with pytest.raises(InternalError, match="before load_model"):
        _ = runner.model_info
    runner.load_model()
    with pytest.raises(InternalError, match="before initialize_from_config"):
        runner.execute_model(SchedulerOutput())


def test_collective_rpc_calls_any_method_of_the_rank(folder: Path) -> None:
    """A11, D2 for one rank: results are in rank order; private and unknown names are rejected."""
    executor = create_executor(EngineSettings(model=folder, device="auto"))
    assert executor.collective_rpc("get_model_info") == [executor.model_info]
    for name in ("no_such_method", "_forward", "device"):
        with pytest.raises(InternalError, match=name):
            executor.collective_rpc(name)


@pytest.mark.parametrize(
    ("setting", "num_cuda", "device"),
    [
        ("cpu", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 1, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_devices(setting: str, num_cuda: int, device: str) -> None:
    """A11: the executor is chosen by device."""
    assert resolve_device(setting, num_cuda) == torch.device(device)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("tpu", "device is 'tpu'; choose one of auto, cpu, cuda"),
        ("cuda:x", "device is 'cuda:x'; choose one of"),
        ("cuda", "has 0 CUDA devices"),
        ("cuda:3", "device is 'cuda:3'.*has 0 CUDA devices"),
    ],
)
def test_unavailable_devices_are_rejected(setting: str, words: str) -> None:
    """A11: the error names an unknown or absent device."""
    with pytest.raises(SettingError, match=words) as caught:
        resolve_device(setting, 0)
    assert caught.value.param == "device"


@pytest.mark.parametrize("setting", ["auto", "cuda", "cuda:1"])
def test_amd_gpus_are_refused_in_one_sentence(setting: str) -> None:
    """Torch calls them CUDA devices; Triton's options for NVIDIA GPUs would be an exception in the middle of the start."""
    with pytest.raises(
        SettingError, match=r"AMD GPUs \(ROCm 6\.4\), which are not supported: .*cpu"
    ) as caught:
        resolve_device(setting, 2, rocm="6.4")
    assert caught.value.param == "device"
    assert (
        resolve_device("cpu", 2, rocm="6.4") == resolve_device("auto", 0, rocm="6.4") == torch.device("cpu")
    )


def test_transformers_is_imported_only_for_its_own_models() -> None:
    files = list(Path(engine.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    importing = [file for file in files if re.search(r"(?m)^\s*(import|from) transformers", file.read_text())]
    assert {file.stem for file in importing} == {
        "paged_attention",
        "states_program",
        "transformers_loading",
        "transformers_rules",
    }


def test_a_built_in_model_is_loaded_without_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    program = (
        "import sys, torch; from pathlib import Path; from engine.models.loading import load;"
        f"load(Path({str(folder)!r}), 'auto', None, torch.device('cpu')); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
