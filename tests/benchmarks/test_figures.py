"""The figures that benchmarks compute from their samples."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from benchmarks import tables
from benchmarks.ceilings import Ceilings, Machine, Weights
from benchmarks.facts import versions_in
from benchmarks.gaps import Latency, of_chats, percentile
from benchmarks.goodput import all_maps, difference, goodput, goodput_map
from benchmarks.interference import compared as interference_over
from benchmarks.kv_overlap import hidden_share
from benchmarks.load import Outcome
from benchmarks.others import Use, watch_use
from benchmarks.rows import ROWS, Row, Scene, Sizes, compared, quiet_sample, share_equal
from benchmarks.runners import Order
from benchmarks.samples import sample, summary
from benchmarks.streams import Stream
from protos import inference_pb2 as pb
from tests.checkpoints import make_checkpoint

PREFILL, SINGLE, EIGHT, _ = ROWS
SIZES = Sizes(vocab_size=100, long_prompt=40, prompt=10, answer=5)


def seconds(order: Order) -> float:
    """An engine that takes 0.1 s for each prompt token and 1 s for each step of a batch behind the first token."""
    return sum(0.1 * sum(map(len, batch)) + order.num_tokens - 1 for batch in order.batches)


def test_the_share_of_copying_that_was_hidden() -> None:
    """Nothing is copied for a prompt whose KV was there already: all of it counts as hidden."""
    shares = [
        hidden_share(pb.Timings(transfer=exposed, transfer_copying=copying))
        for exposed, copying in ((0.0, 0.0), (0.25, 1.0), (2.0, 1.0))
    ]
    assert shares == [1.0, 0.75, 0.0]


def test_versions_are_those_of_the_peers_own_python() -> None:
    assert versions_in(sys.executable, "torch", "msgspec") == {
        name: version(name) for name in ("torch", "msgspec")
    }


def test_decoding_is_told_from_the_prompt() -> None:
    assert PREFILL.sample(seconds, SIZES, Random(0)) == pytest.approx(10.0)
    assert SINGLE.sample(seconds, SIZES, Random(0)) == pytest.approx(1000.0)
    assert EIGHT.sample(seconds, SIZES, Random(0)) == pytest.approx(8.0)


def test_limits_are_those_of_memory_or_of_arithmetic() -> None:
    weights = Weights(num_bytes=200, num_multiplied=100, num_in_head=20)
    slow_memory, slow_arithmetic = Ceilings(100.0, 1e6), Ceilings(1e6, 800.0)
    assert SINGLE.limit(slow_memory, weights) == pytest.approx(2000.0)
    assert EIGHT.limit(slow_memory, weights) == pytest.approx(4.0)
    assert EIGHT.limit(slow_arithmetic, weights) == pytest.approx(4.0)
    assert PREFILL.limit(slow_arithmetic, weights) == pytest.approx(5.0)
    assert PREFILL.limit(slow_arithmetic, replace(weights, num_behind_kv=30)) == pytest.approx(8.0)


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_embedding_is_read_where_it_is_the_head(tmp_path: Path, is_tied: bool) -> None:
    folder = make_checkpoint(tmp_path, "qwen2", dtype=torch.bfloat16, tie_word_embeddings=is_tied)
    weights = Weights.of(folder)
    in_file = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    looked_up = 0 if is_tied else 2 * weights.num_in_head
    assert weights.num_in_head == 264 * 64
    config = json.loads((folder / "config.json").read_text())
    queries, size = config["num_attention_heads"] * config["head_dim"], config["hidden_size"]
    assert weights.num_behind_kv == size * (2 * queries + 3 * config["intermediate_size"])
    assert in_file - 10_000 < weights.num_bytes + looked_up < in_file


def test_the_machine_is_measured() -> None:
    machine = Machine(2, num_bytes=2**22)
    assert machine.read_bytes(repeats=1) > 0
    assert machine.flops(repeats=1) > 0


def test_only_quiet_samples_count() -> None:
    def used(cores: float) -> Use:
        return Use(wall_seconds=2.0, other_cpu_seconds=2 * cores)

    samples = [sample(1.0, used(0.05)), sample(3.0, used(0.1)), sample(90.0, used(0.2))]
    found = summary(samples)
    assert (found["median"], found["is_quiet"], found["num_dropped"]) == (2.0, True, 1)
    noisy = summary(samples[2:])
    assert (noisy["median"], noisy["is_quiet"], noisy["num_dropped"]) == (90.0, False, 0)
    assert sample(1.0, used(-1.0))["other_cores"] == 0.0


def test_own_work_is_not_that_of_others() -> None:
    with watch_use() as use:
        sum(range(3_000_000))
    assert use.own_cpu_seconds > 0
    assert use.wall_seconds > 0


def test_engines_are_compared_with_the_best_of_the_others() -> None:
    def of(row: Row, *limits: float, **values: tuple[float, ...]) -> dict[str, list[dict[str, Any]]]:
        return {
            name: [
                {"round": number, "value": value, "limit": limit, "share_of_limit": row.over(value, limit)}
                | {"is_quiet": value < 90}
                for number, (value, limit) in enumerate(zip(own, limits, strict=True))
            ]
            for name, own in values.items()
        }

    times = of(SINGLE, 8.0, 4.0, kvbaton=(10.0, 5.0), one=(20.0, 5.0), two=(15.0, 7.0))
    found = compared(SINGLE, times, "kvbaton")
    assert found["over"]["one"]["ratios"] == [2.0, 1.0]
    assert (found["best_peer"], found["over_best_peer"], found["limit"]) == ("two", 1.45, 6.0)
    assert found["share_of_limit"]["kvbaton"] == pytest.approx(0.8)
    times["two"][1]["limit"] = 6.0  # its machine was another: that round does not count
    assert compared(SINGLE, times, "kvbaton")["over"]["two"]["ratios"] == [1.5]
    speeds = of(EIGHT, 40.0, 40.0, kvbaton=(30.0, 60.0), one=(20.0, 100.0))
    assert compared(EIGHT, speeds, "kvbaton")["over_best_peer"] == 1.5
    noisy = compared(EIGHT, of(EIGHT, 40.0, kvbaton=(30.0,), one=(100.0,)), "kvbaton")
    assert noisy["over"]["one"] == {"median": 0.3, "is_fair": False, "ratios": [0.3]}
    assert compared(EIGHT, of(EIGHT, 40.0, kvbaton=(30.0,)), "kvbaton")["over_best_peer"] is None


class NeighboursMachine:
    """Gives so many bytes per second, reading by reading."""

    def __init__(self, *readings: float) -> None:
        self._readings = list(readings)

    def read_bytes(self) -> float:
        return self._readings.pop(0)

    def flops(self) -> float:
        return 1e6


class SteadyRunner:
    """Takes a second for the first token, and two for all."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def run(self, order: Order) -> dict[str, float]:
        return {"seconds": 1.0 if order.num_tokens == 1 else 2.0}


@pytest.mark.parametrize(
    ("row", "readings", "num_samples"),
    [(SINGLE, (50.0, 45.0), 1), (SINGLE, (50.0, 100.0, 100.0, 100.0), 2), (PREFILL, (), 1)],
)
def test_a_sample_is_repeated_when_the_machine_has_changed(
    row: Row, readings: tuple[float, ...], num_samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A memory-bound row; a sample's limit is that of its own time."""
    monkeypatch.setattr("benchmarks.rows.watch_use", lambda: nullcontext(Use(wall_seconds=1.0)))
    weights, runner = Weights(num_bytes=20, num_multiplied=10, num_in_head=0), SteadyRunner()
    machine = NeighboursMachine(100.0, *readings)
    scene = Scene(machine, weights)  # type: ignore[arg-type]
    scene.begin_round()
    samples = quiet_sample(row, runner, SIZES, Random(0), 3, scene)  # type: ignore[arg-type]
    assert len(samples) == num_samples
    assert [one["is_quiet"] for one in samples] == [False] * (num_samples - 1) + [True]
    if row is SINGLE:
        limits = [1000 * 20 / reading for reading in readings[:2]]
        assert samples[0]["limit"] == pytest.approx(sum(limits) / 2)


def test_tokens_are_compared_place_by_place() -> None:
    assert share_equal([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.75
    with pytest.raises(ValueError, match="zip"):
        share_equal([[1]], [[1, 2]])


def test_gaps_between_tokens() -> None:
    steady = Stream(0.0, [1.0, 1.1, 1.2, 1.3], num_tokens=4)
    stalled = Stream(0.0, [2.0, 2.1, 2.35, 2.75], num_tokens=8)
    found = of_chats([steady, stalled], wall_seconds=3.0)
    assert found["itl_p50"] == pytest.approx(100.0)
    assert found["itl_max"] == pytest.approx(400.0)
    assert found["largest_gaps"][:2] == pytest.approx([400.0, 250.0])
    assert (found["num_gaps"], found["num_gaps_over_2x"], found["num_gaps_over_3x"]) == (6, 2, 1)
    assert found["worst_gap_per_chat_p50"] == pytest.approx(250.0)
    assert found["tokens_per_second"] == pytest.approx(4.0)
    assert found["tokens_per_event"] == pytest.approx(1.5)
    assert found["ttft_p50"] == pytest.approx(1500.0)
    assert percentile([], 0.5) is None
    assert percentile([1.0, 2.0, 3.0], 0.75) == 2.5
    assert of_chats([], wall_seconds=1.0)["itl_p999"] is None


def outcome(rate: float, chat: Latency, prompt: Latency | None) -> Outcome:
    return Outcome(rate, [chat] * 9 + [Latency(99.0, 99.0)], [prompt] if prompt else [], {"other_cores": 0.0})


def test_goodput_is_the_highest_rate_that_meets_both_goals() -> None:
    outcomes = [
        outcome(0.0, Latency(0.1, 0.01), None),
        outcome(0.5, Latency(0.1, 0.02), Latency(1.0, 0.02)),
        outcome(1.0, Latency(0.1, 0.03), Latency(3.0, 0.02)),
    ]
    assert goodput(outcomes, ttft=5.0, tpot=0.05) == 1.0
    assert goodput(outcomes, ttft=2.0, tpot=0.05) == 0.5
    assert goodput(outcomes, ttft=5.0, tpot=0.01) == 0.0
    assert goodput(outcomes, ttft=0.05, tpot=0.05) is None
    assert goodput_map(outcomes, [2.0, 5.0], [0.01, 0.05]) == [[0.0, 0.5], [0.0, 1.0]]
    maps, ttfts, tpots = all_maps({"ours": outcomes, "other": outcomes[:1]})
    assert maps["ours"][-1][-1] == 1.0
    assert maps["other"][-1][-1] == 0.0
    assert len(maps["ours"]) == len(ttfts)
    assert len(maps["ours"][0]) == len(tpots)


def test_where_ours_wins_and_loses() -> None:
    ours, others = [[1.0, None, None, 0.0]], [[[0.5, 0.25, None, None]], [[None, 0.125, None, None]]]
    assert difference(ours, others, step=0.125) == [[0.5, -0.375, None, 0.125]]


def test_configurations_are_compared_round_by_round() -> None:
    def run(itl: float, ttft: float | None) -> dict[str, object]:
        names = ("itl_p999", "itl_p99", "worst_gap_per_chat_p50", "tokens_per_second")
        return {
            "chats": dict.fromkeys(names, itl),
            "long_prompts": {"ttft_p50": ttft},
        }

    ours, theirs = "prefill 1, decode 1", "both 1"
    rounds = [{ours: run(5.0, 6.0), theirs: run(20.0, 3.0)}, {ours: run(9.0, None), theirs: run(9.0, 3.0)}]
    rounds.append({ours: run(1.0, 6.0), theirs: run(10.0, 2.0)})
    found = interference_over({"rounds": rounds})
    assert found[theirs]["itl_p999"] == 0.25, "not the ratio of the medians, which is 0.5"
    assert found[theirs]["long_ttft_p50"] == 2.5, "of the rounds that know it"


def test_the_page_has_the_tables_of_the_results(tmp_path: Path) -> None:
    assert tables.main(["--check"]) == 0
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- table: service_speed_m.1 -->\nold\n<!-- end -->\nbehind\n")
    found = {
        "date": "2026-01-01",
        "commit": "abc",
        "machine": {"cpu": "a processor", "cores": 2},
        "figures": {
            "command": "python -m benchmarks.service_speed",
            "plan": {"at_once": 32, "prompt": 128, "answer": 128},
            "offline": {"median": 100.0, "is_quiet": True},
            "service": {"median": 90.0, "is_quiet": False},
            "service_over_offline": 0.9,
            "wait_for_first_token_ms": {"service": {"p50": 5.0}, "worker": {"p50": 3.0}},
            "router_adds_to_ttft_ms": 2.0,
        },
    }
    (tmp_path / "service_speed_m.1.json").write_text(json.dumps(found))
    assert tables.main(["--check"], page, tmp_path) == 1
    assert tables.main([], page, tmp_path) == 0
    assert tables.main(["--check"], page, tmp_path) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nbehind\n")
    assert "| service over engine | 90% |" in text
    assert "90 (noisy)" in text
    assert "| the router adds, p50 | 2.00 ms |" in text
    assert "old" not in text
