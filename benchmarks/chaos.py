"""``python -m benchmarks.chaos`` (``make chaos``): a pool is changed and broken under load, to ``results/chaos.json``.

The pool has two routers behind a TCP balancer, three prefill and three decode workers of the demo model. 32 clients send
greedy and seeded requests over HTTP and gRPC, streamed and whole, with grammars, tool calls, two answers and log
probabilities. Every six seconds something happens: a worker is killed, frozen, cut off from another one, drained, flipped
or added, or a router is killed (``tests/chaos/pool/events.py``). Each accepted request whose router lives must end with the
tokens of the undisturbed run, and nothing may be held at the end, descriptors included. The pauses of moves are listed
with their bounds, those that a fault has met apart (``tests/chaos/pool/moves.py``). In two
further scenarios, four decode workers shrink to one, and all workers are restarted one after the other.
``--only`` runs one scenario and leaves the figures of the others; ``--seed`` repeats a run as far as the machine allows.
"""

import argparse
import asyncio
import json
import logging
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.facts import RESULTS, read_figures, run_facts, write_result
from tests.chaos.pool.report import PoolReport
from tests.chaos.pool.run import Load, Sizes, run_pool
from tests.chaos.pool.scripts import Disturb, Restart, ScaleIn

_NAME = "chaos"


def main() -> None:
    """Run the scenarios, write the figures; the exit code is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--seed", type=int, help="of a run to repeat")
    parser.add_argument("--only", help="run only the scenarios whose names contain this")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    sys.stderr.write(f"chaos: --seed {seed}\n")
    logging.getLogger("kv_transfer").setLevel(logging.ERROR)  # warnings about intended faults are of no use
    torch.set_num_threads(1)  # the workers need the cores
    scenarios = _earlier() if given.only else {}
    scenarios |= {
        name: _timed(name, run, seed) for name, run in _scenarios(given) if (given.only or "") in name
    }
    figures = {"is_clean": all(each["is_clean"] for each in scenarios.values()), "scenarios": scenarios}
    path = write_result(_NAME, figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(not figures["is_clean"])


Run = Callable[[Path, random.Random], Coroutine[Any, Any, PoolReport]]


def _scenarios(given: argparse.Namespace) -> list[tuple[str, Run]]:
    load = Load(num_clients=given.clients)
    three = Sizes(given.routers)
    return [
        ("mixed", partial(run_pool, sizes=three, script=Disturb(60 * given.minutes), load=load)),
        ("scale-in", partial(run_pool, sizes=Sizes(given.routers, 2, 4), script=ScaleIn(), load=load)),
        ("rolling restarts", partial(run_pool, sizes=three, script=Restart(given.restarts), load=load)),
    ]


def _timed(name: str, run: Run, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvbaton-chaos-") as folder:
        try:
            figures = asyncio.run(run(Path(folder), random.Random(f"{seed}:{name}"))).as_dict()
        except (AssertionError, TimeoutError, ExceptionGroup) as error:
            figures = {"error": repr(error), "is_clean": False}
    sys.stderr.write(f"{name}: {'clean' if figures['is_clean'] else 'BROKEN'}\n")
    seconds = round(time.monotonic() - began)
    return {"commit": run_facts()["commit"], "seed": seed, **figures, "duration_seconds": seconds}


def _earlier() -> dict[str, Any]:
    """Return the figures of the scenarios that ran before."""
    if not (RESULTS / f"{_NAME}.json").exists():
        return {}
    scenarios: dict[str, Any] = read_figures(_NAME)["scenarios"]
    return scenarios


if __name__ == "__main__":
    main()
