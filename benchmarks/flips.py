"""``python -m benchmarks.flips``: workers change their roles under load, to ``results/flips.json``.

Three workers of the demo model run in one process with a router: one or two of each role, so that the role that a worker
takes next is the one that requests wait for. Measured is the time from the order to the router's knowledge of the role, and
to the first leg that the worker accepts in it. Every answer is compared with an undisturbed one, and at the end nothing may
be held anywhere.
"""

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.facts import write_result
from tests.e2e.flips import run_flips

MODEL = Path(__file__).parents[1] / "kvbaton" / "demo_model"


def main() -> None:
    """Run, and write the figures; the exit code is 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, help="of a run to repeat")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = run_flips(Path(folder), MODEL, given.flips, given.clients, random.Random(seed))
        figures = asyncio.run(run)
    figures = {"seed": seed, "load_before": round(load_before, 1), **figures}
    path = write_result("flips", figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(bool(figures["num_wrong"]))


if __name__ == "__main__":
    main()
