"""A model split into two ranks: the same answers, each rank with its own part of weights and KV, and rejected models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contract.errors import SettingError
from contract.sampling import SamplingParams
from engine.distributed.group import rank_device
from engine.models.loading import load
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_compute.driver import Driver, greedy
from tests.engine_compute.test_equals_transformers import NUM_TOKENS, PROMPTS, VARIANTS
from tests.engine_parallel.driver import SEEDED, RanksDriver, driven
from tests.fakes.engine.local_ranks import Exchange, LocalRankGroup, LocalRanksExecutor
from tests.leftovers import Leftovers


def answers(driver: Driver, chunk: int) -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        driver.add(f"greedy {name}", prompt)
        driver.add(f"seeded {name}", prompt, SEEDED)
    return driver.generate(list(driver.sequences), NUM_TOKENS, chunk)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_give_the_answers_of_one(tmp_path: Path, variant: str) -> None:
    """D1: every family and variation, greedy and seeded, whole and in chunks beside decodes."""
    family, overrides = VARIANTS[variant]
    folder = make_checkpoint(tmp_path, family, seed=3, **overrides)
    with driven(Driver(folder)) as one:
        expected = answers(one, 1000)
    assert len({tuple(answer) for answer in expected.values()}) > len(PROMPTS)
    with driven(RanksDriver(folder)) as two:
        assert answers(two, 7) == expected


def test_demo_model_and_logprobs(demo_model: Path) -> None:
    """B9: the log probabilities are those of the whole vocabulary."""
    outputs = []
    for driver_class in (Driver, RanksDriver):
        with driven(driver_class(demo_model, block_size=16, max_model_len=256)) as driver:
            driver.add("a", PROMPTS["long"], greedy(logprobs=5))
            outputs.append(driver.step({"a": len(PROMPTS["long"])}))
    one, two = (output.logprobs for output in outputs)
    assert one is not None and two is not None
    assert one.logprob_token_ids == two.logprob_token_ids
    assert two.logprobs[0] == pytest.approx(one.logprobs[0], abs=1e-4)
    assert outputs[0].sampled_token_ids == outputs[1].sampled_token_ids


def test_each_rank_holds_its_heads(tmp_path: Path) -> None:
    """D5, D9: a rank's block has half the KV heads; with equal bytes there are as many blocks as with one rank."""
    folder = make_checkpoint(tmp_path)
    with driven(Driver(folder)) as one, driven(RanksDriver(folder)) as two:
        for driver in (one, two):
            driver.add("a", PROMPTS["long"])
            driver.generate(["a"], 3, chunk=9)
        assert one.num_blocks == two.num_blocks
        assert two.executor.layout.num_kv_heads == 1
        blocks = two.sequences["a"].blocks
        whole = one.runner.memory.pool[blocks]
        assert isinstance(two, RanksDriver)
        for rank, runner in enumerate(two.ranks.runners):
            torch.testing.assert_close(runner.memory.pool[blocks], whole[:, :, :, rank : rank + 1])


@pytest.mark.parametrize(("sampling", "num_nans"), [(None, 1), (SEEDED, 264)])
def test_nan_affects_only_its_request(tmp_path: Path, sampling: SamplingParams | None, num_nans: int) -> None:
    """B8: a row without a token has none on every rank. Rank 0 counts all of its NaN where it has whole logits."""
    folder = make_checkpoint(tmp_path)
    with driven(RanksDriver(folder)) as two, driven(Driver(folder)) as one:
        for driver in (one, two):
            driver.add("sick", PROMPTS["long"], sampling)
            driver.add("well", PROMPTS["short"], sampling)
            driver.step({"sick": len(PROMPTS["long"]), "well": len(PROMPTS["short"])})
        two.runner.memory.pool[two.sequences["sick"].blocks[0]] = torch.nan
        output = two.step({"sick": 1, "well": 1})
        assert output.num_nans_in_logits == {"sick": num_nans}
        assert output.sampled_token_ids == [[], one.step({"sick": 1, "well": 1}).sampled_token_ids[1]]


def load_rank(folder: Path, rank: int, size: int) -> Any:
    return load(folder, "auto", None, torch.device("cpu"), LocalRankGroup(rank, Exchange(size)))


def test_a_rank_reads_only_its_own_part(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", tie_word_embeddings=True)
    whole = dict(load(folder, "auto", None, torch.device("cpu")).model.named_parameters())
    parts = [dict(load_rank(folder, rank, 2).model.named_parameters()) for rank in range(2)]
    cut = {
        name: 0 for name in whole if "norm" not in name and "down_proj" not in name and "o_proj" not in name
    }
    cut |= {name: 1 for name in whole if name.endswith(("down_proj.weight", "o_proj.weight"))}
    for name, tensor in whole.items():
        if name in cut:
            assert torch.equal(torch.cat([part[name] for part in parts], cut[name]), tensor)
        else:
            assert torch.equal(parts[0][name], tensor) and torch.equal(parts[1][name], tensor)
    assert 1.9 < sum(map(torch.numel, whole.values())) / sum(map(torch.numel, parts[0].values())) <= 2


def test_whole_shapes_are_compared(tmp_path: Path) -> None:
    """The error for a tensor of the wrong size names its whole size, not that of a part."""
    folder = make_checkpoint(tmp_path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 100}))
    with pytest.raises(
        SettingError, match=r"gate_proj\.weight is \[96, 64\]; config\.json requires \[100, 64\]"
    ):
        load_rank(folder, 1, 2)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(SettingError, match="misses"):
        load_rank(folder, 1, 2)


def test_an_error_of_all_ranks_is_raised_and_leaves_no_thread(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    leftovers = Leftovers()
    with pytest.raises(SettingError, match="misses"):
        LocalRanksExecutor(EngineSettings(model=folder, tensor_parallel_size=2))
    assert leftovers.threads() == []


@pytest.mark.parametrize(
    ("setting", "num_cuda", "devices"),
    [
        ("cpu", 0, ["cpu"]),
        ("cpu", 8, ["cpu", "cpu", "cpu"]),
        ("auto", 0, ["cpu", "cpu"]),
        ("auto", 1, ["cuda:0"]),
        ("auto", 2, ["cuda:0", "cuda:1"]),
        ("cuda", 4, ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:1", 4, ["cuda:1", "cuda:2", "cuda:3"]),
        ("cuda:3", 4, ["cuda:3"]),
    ],
)
def test_each_rank_has_its_own_device(setting: str, num_cuda: int, devices: list[str]) -> None:
    """A11: one rank for each GPU, side by side from the setting's device on."""
    size = len(devices)
    assert [str(rank_device(setting, num_cuda, rank, size)) for rank in range(size)] == devices


@pytest.mark.parametrize(
    ("setting", "num_cuda", "size"), [("auto", 1, 2), ("cuda", 3, 4), ("cuda:1", 2, 2), ("cuda:3", 4, 8)]
)
def test_two_ranks_share_no_gpu(setting: str, num_cuda: int, size: int) -> None:
    """A11: every rank refuses, also those for which there is a GPU."""
    message = f"tensor_parallel_size is {size}, and this machine has {num_cuda} CUDA devices"
    for rank in range(size):
        with pytest.raises(SettingError, match=message):
            rank_device(setting, num_cuda, rank, size)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "rank_timeout_seconds"])
def test_settings_out_of_range(name: str) -> None:
    with pytest.raises(SettingError, match=name):
        EngineSettings(model=Path("m"), **{name: 0})  # type: ignore[arg-type]
