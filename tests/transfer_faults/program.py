"""``python -m tests.transfer_faults.program links SEED NUM_SCHEDULES``, or ``namespaces``: prints a report as JSON.

``--only N`` repeats one schedule of ``links``. It is a program of its own because each worker's process imports the main
module: this one needs neither torch nor a model. The exit code is 1 if a promise was broken.
"""

import argparse
import asyncio
import json
import sys

from tests.transfer_faults.namespaces import run_in_namespaces
from tests.transfer_faults.schedules import run_schedules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("where", choices=("links", "namespaces"))
    parser.add_argument("seed", type=int)
    parser.add_argument("num_schedules", type=int)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    if given.where == "links":
        run = run_schedules(given.seed, given.num_schedules, only=given.only)
    else:
        run = run_in_namespaces(given.seed, given.num_schedules)
    report = asyncio.run(run)
    sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
