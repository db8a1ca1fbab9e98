"""``python -m benchmarks.flips``: workers change their roles under load, to ``results/flips.json``.

Three workers of the demo model run in processes of their own, one or two of each role, and clients in another one; the
router runs here. There are so many clients that requests always wait. Measured is the time from the order to the report of
the role, and to the first leg that the worker has accepted in it, which is sorted by what it waited for: a request,
room on a worker of the other role, or neither. Every answer is compared with an undisturbed one, and at the end nothing may
be held anywhere. Goal: 99 in 100 first legs within 100 ms.
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

from benchmarks.facts import write_result
from tests.e2e.flips import MAX_NUM_SEQS, run_flips


def main() -> None:
    """Run, and write the figures; the exit code is 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, help="of each worker")
    parser.add_argument("--seed", type=int, help="of a run to repeat")
    given = parser.parse_args()
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run = run_flips(Path(folder), given.flips, given.clients, random.Random(seed), given.max_num_seqs)
        figures = asyncio.run(run)
    figures = {"seed": seed, "load_before": round(load_before, 1), **figures}
    path = write_result("flips", figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(bool(figures["num_wrong"]))


if __name__ == "__main__":
    main()
