"""The time line of both scheduling policies, as it is measured."""

from pathlib import Path

from benchmarks.policies import POLICIES, Load, longest_gap, measure, table
from engine.settings import EngineSettings
from tests.checkpoints import VOCAB_SIZE, make_checkpoint


def test_both_policies_get_the_same_load(tmp_path: Path) -> None:
    """A33: equal tokens of the same requests, whatever the policy; the times are of one clock."""
    load = Load(
        VOCAB_SIZE, answer_tokens=12, prompt_tokens=40, tokens_after_prompt=3, chunk_tokens=4, arrivals=(2, 5)
    )
    settings = EngineSettings(model=make_checkpoint(tmp_path), kv_cache_bytes=2**20)
    found = measure(settings, load, num_rounds=1)
    assert found["equal_tokens"] and list(found["policies"]) == list(POLICIES)
    for own in found["policies"].values():
        shown = own["shown"]
        counts = {name: len(times) for name, times in shown["times"].items()}
        assert counts == {**{f"answer {n}": 12 for n in range(3)}, "prompt 0": 3, "prompt 1": 3}
        assert shown["arrived"]["prompt 0"] == 0.0 < shown["arrived"]["prompt 1"]
        assert longest_gap(shown) == own["longest_gap"] >= own["median_gap"]
    text = table(found)
    assert "| `prefill-first` | " in text and "The tokens are the same." in text


def test_the_longest_gap_is_that_of_a_running_answer() -> None:
    times = {"answer 0": [-1.0, 0.0, 3.0], "answer 1": [0.5, 1.0], "prompt 0": [2.0, 9.0]}
    assert longest_gap({"arrived": {"prompt 0": 0.0}, "times": times}) == 3.0
