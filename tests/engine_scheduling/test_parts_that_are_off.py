"""Optional parts of a scheduler that are off: no line of them runs in a step, or between steps."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from engine.scheduling.batch import drafting
from engine.scheduling.tiers import kv_tiers, loads, tier, write_behind
from tests.engine_scheduling.stepping import SteppedEngine, arrive, fake_request, receiving
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer

PARTS = {"speculate": (drafting,), "host_kv_bytes": (kv_tiers, tier, loads, write_behind)}
ON = {"speculate": "ngram", "host_kv_bytes": 32}


def num_calls(**changes: Any) -> Counter[str]:
    """Count the calls into the modules of each part, from the start of an engine to its end."""
    calls = Counter[str]()
    names = {Path(str(module.__file__)): name for name, modules in PARTS.items() for module in modules}

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := names.get(Path(frame.f_code.co_filename))):
            calls[name] += 1

    sys.setprofile(count)
    try:
        serve(SteppedEngine(kv_cache_bytes=12, **changes))
    finally:
        sys.setprofile(None)
    return calls


def serve(engine: SteppedEngine) -> None:
    """Answer what fills the pool, a corrupt request, and one whose prompt comes from elsewhere; use the other calls."""
    for index in range(3):
        engine.add(fake_request(f"r{index}", [index + 1] * 5, 20))
    engine.add(fake_request("bad", [1, NAN_TOKEN]))
    engine.run()
    arrive(engine, receiving(engine))
    engine.run()
    assert engine.tokens("r2#0.0") == fake_answer([3] * 5, 20)
    assert engine.scheduler.totals.num_preemptions and engine.scheduler.totals.num_corrupted
    for call in ("stats", "counters", "debug_state", "check_integrity"):
        engine.core.call(call, [])
    assert engine.scheduler.reset_prefix_cache()
    engine.core.shutdown()


@pytest.mark.parametrize("name", ON)
def test_a_part_that_is_off_is_never_entered(name: str) -> None:
    calls = num_calls(**{other: value for other, value in ON.items() if other != name})
    assert calls[name] == 0
    assert all(calls[other] > 100 for other in ON if other != name), "one that is on is seen here"
