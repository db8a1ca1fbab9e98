"""``python -m benchmarks.kv_transfer``: transports compared with bare copies, to ``results/kv_transfer.json``.

Sections (all, or those of ``--only shm,tcp``): ``shm`` and memcpy, in loops in Python and in C, over the same two
memfd-backed pools and the same blocks; ``tcp`` and a bare loop over sockets (with the system's defaults, and with the one
option that our sockets set: ``leave_unpaced``) and NIXL's TCP; ``nixl`` and a bare NIXL script, each in a separate process;
``overlap`` with real workers. Ways take turns, and the first and the last round of each are checked byte by byte. All are
launched several times, with new processes and pools, since the location of a pool's pages changes a ratio by a tenth. The
process that starts first is slower, by up to a third, so ``nixl`` and its bare script take turns in that. Small transfers
use more rounds than ``--rounds``. A ratio is the median over the launches of the median over the rounds.

"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import write_result
from benchmarks.kv_held import held_up
from benchmarks.kv_nixl import TCP_ONLY, over_bare_nixl
from benchmarks.kv_overlap import measure_overlap
from benchmarks.kv_pools import SHAPES, Job, Shape, Way, compare, job_of, over_launches, ratio, speeds
from benchmarks.kv_ways import (
    memcpy_in_c,
    memcpy_in_python,
    over_bare_sockets,
    over_transport,
    over_transport_elsewhere,
)
from kv_transfer.transports.nixl.agent import why_missing

_BYTES_OF_FEW_ROUNDS = 2**25
_LAUNCHES_OF_LITTLE = 2
"""Smaller transfers use more rounds, and this many times as many launches: a delay of 0.1 ms by other processes matters
more, and so does the location of a launch's pools in memory (one may be 1.7 times as fast as another).
"""
_MUST = 0.9
_MUST_WITH_DIGESTS = 0.8
_MUST_OF_NIXL_TCP = 2.0
Section = Callable[[Job, int, int], dict[str, Any]]
"""Maps (job, number of rounds, index of the launch) to figures."""


def main() -> None:
    """Run the sections, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="shm,tcp,nixl,overlap", help="comma-separated sections")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument(
        "--launches", type=int, default=4, help="number of launches; an even number is fair to both"
    )
    parser.add_argument(
        "--model", help="overlap: a checkpoint's folder, which also names the file; unset: the demo model"
    )
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="overlap: length of the prompts")
    parser.add_argument("--requests", type=int, default=60, help="overlap: number of requests")
    given = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {
        "num_rounds": given.rounds,
        "num_launches": given.launches,
        "load_average": {"start": os.getloadavg()},
    }
    for section in given.only.split(","):
        if section == "overlap":
            figures[section] = measure_overlap(given.model, given.prompt_tokens, given.requests)
        else:
            figures[section] = _all_shapes(section, given.rounds, given.launches)
        figures["load_average"][section] = os.getloadavg()
        _print(section, figures[section])
    name = "kv_transfer" if given.model is None else f"kv_transfer_{Path(given.model).name}"
    sys.stdout.write(f"{write_result(name, figures)}\n")


def _all_shapes(name: str, num_rounds: int, num_launches: int) -> dict[str, Any]:
    missing = why_missing() if name == "nixl" else None
    if missing is not None:
        return {"left out": missing}

    def launched(shape: Shape, in_runs: bool = False) -> dict[str, Any]:
        times = max(1, _BYTES_OF_FEW_ROUNDS // shape.num_bytes)
        count = num_launches * (_LAUNCHES_OF_LITTLE if times > 1 else 1)
        section = _SECTIONS[name]
        launches = [section(job_of(shape, in_runs), num_rounds * times, launch) for launch in range(count)]
        ratios = zip(*(launch["ratios"] for launch in launches), strict=True)
        return {"ratios": [over_launches(each) for each in ratios], "launches": launches}

    found = {shape.name: launched(shape) for shape in SHAPES}
    if name == "shm":
        found |= {f"{shape.name}, in runs": launched(shape, in_runs=True) for shape in SHAPES[:2]}
    return found


def _print(section: str, found: dict[str, Any]) -> None:
    for name, part in found.items():
        lines = part.get("ratios") or [part.get("medians")] if isinstance(part, dict) else [part]
        for line in filter(None, lines):
            sys.stdout.write(f"{section} {name}: {json.dumps(line)}\n")


def _shm(job: Job, num_rounds: int, _launch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, over_transport("shm", job) as (fetch, pull):
        ways: dict[str, Way] = {"memcpy, Python": memcpy_in_python(job), "shm": fetch, "shm, digests": pull}
        in_c = memcpy_in_c(job, Path(folder))
        if in_c is not None:
            ways["memcpy, C"] = in_c
        seconds = compare(job, ways, num_rounds)
        held = held_up(fetch)
    ratios = [
        ratio(seconds, ours, name, goal)
        for ours, goal in (("shm", _MUST), ("shm, digests", 0.0))
        for name in ways
        if name.startswith("memcpy")
    ]
    return {"speeds": speeds(job.shape, seconds), "ratios": ratios, "held_up_microseconds": held}


def _tcp(job: Job, num_rounds: int, _launch: int) -> dict[str, Any]:
    with ExitStack() as stack:
        fetch, pull = stack.enter_context(over_transport("tcp", job))
        found: dict[str, Any] = {}
        ratios: list[dict[str, object]] = []
        for name, is_unpaced in (("bare sockets", False), ("bare sockets, unpaced", True)):
            bare = stack.enter_context(over_bare_sockets(job, is_unpaced=is_unpaced))
            goals = (0.0, 0.0) if is_unpaced else (_MUST, _MUST_WITH_DIGESTS)
            ours = [("tcp", fetch, goals[0]), ("tcp, digests", pull, goals[1])]
            measured, beside = _beside(job, (name, bare), ours, num_rounds)
            found |= measured
            ratios += beside
        held = held_up(fetch)
        if why_missing() is None:  # separately: the script's sender polls, which would slow the others
            nixl = stack.enter_context(over_bare_nixl(job, TCP_ONLY))
            seconds = compare(job, {"tcp": fetch}, num_rounds)
            seconds |= compare(job, {"bare NIXL, TCP": nixl}, num_rounds)
            ratios.append(ratio(seconds, "tcp", "bare NIXL, TCP", _MUST_OF_NIXL_TCP))
            found |= {"bare NIXL, TCP": speeds(job.shape, seconds)["bare NIXL, TCP"]}
    return {"speeds": found, "ratios": ratios, "held_up_microseconds": held}


def _nixl(job: Job, num_rounds: int, launch: int) -> dict[str, Any]:
    with ExitStack() as stack:
        if launch % 2:
            bare = stack.enter_context(over_bare_nixl(job))
            fetch, pull = stack.enter_context(over_transport_elsewhere("nixl", job))
        else:
            fetch, pull = stack.enter_context(over_transport_elsewhere("nixl", job))
            bare = stack.enter_context(over_bare_nixl(job))
        found, ratios = _beside(
            job, ("bare NIXL", bare), [("nixl", fetch, _MUST), ("nixl, digests", pull, 0.0)], num_rounds
        )
    return {"speeds": found, "ratios": ratios}


def _beside(
    job: Job, bare: tuple[str, Way], ours: list[tuple[str, Way, float]], num_rounds: int
) -> tuple[dict[str, Any], list[dict[str, object]]]:
    """Return speeds and ratios. Each of ours takes turns with the bare way, so both find the other's data in the caches."""
    found: dict[str, Any] = {}
    ratios = []
    for name, way, goal in ours:
        seconds = compare(job, {bare[0]: bare[1], name: way}, num_rounds)
        measured = speeds(job.shape, seconds)
        found |= {f"{bare[0]}, beside {name}": measured[bare[0]], name: measured[name]}
        ratios.append(ratio(seconds, name, bare[0], goal))
    return found, ratios


_SECTIONS: dict[str, Section] = {"shm": _shm, "tcp": _tcp, "nixl": _nixl}

if __name__ == "__main__":
    main()
