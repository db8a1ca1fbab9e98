"""``python -m benchmarks.soak``: all fault scenarios at full length, to ``results/soak.json``.

200 clients over each transport of which most leave, three minutes of kills over each transport, and as long on a model with
recurrent layers and on one with windows, the faults of links and processes, 10,000 short requests at 64 concurrent and as
many at data-parallel groups, 2,000 schedules of faults on hand-overs between processes without a model, 200 more between
network namespaces and 60 on whole workers, 50,000 walks through the protocol, 10,000 moves of answers in further ones, the
state machines at twenty times their usual count, 1,000 flipped bits in the files of a KV tier, and every attack of
``tests/chaos/attacks`` on a whole service.
``KVBATON_SOAK_SEED=1234`` repeats the run of a seed; ``--only faults`` runs one scenario again and leaves the figures of the
others, each with the commit and seed of its run.
"""

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.facts import read_figures, run_facts, write_result
from tests.chaos.attacks.running import MAX_P99_FACTOR, run_attack
from tests.chaos.attacks.weapons import WEAPONS
from tests.chaos.groups import run_groups
from tests.chaos.kills import run_kills
from tests.chaos.leaving import run_leaving
from tests.chaos.models import DEMO, RECURRENT, WINDOWS, ChaosModel
from tests.chaos.settings import chaos_rng, chaos_seed, process_environment
from tests.chaos.short_requests import run_short_requests
from tests.protocol.walking import run_walks
from tests.protocol.worlds import WALKED, WALKED_WITH_MOVES
from tests.transfer_faults.whole_workers import run_whole_workers

TRANSPORTS = ("tcp", "shm")
OTHER_MODELS = ((RECURRENT, "tcp"), (RECURRENT, "shm"), (WINDOWS, "tcp"))
"""The models, and the transports, of further kills."""
FAULTS = ("tests/chaos/test_links.py", "tests/chaos/test_frozen.py")
MACHINES = (
    "tests/engine_scheduling/test_state_machine.py",
    "tests/engine_scheduling/test_slot_machine.py",
    "tests/engine_scheduling/test_state_slots.py",
    "tests/engine_scheduling/test_window_machine.py",
    "tests/engine_scheduling/test_pool_machine.py",
    "tests/engine_scheduling/test_tier_machine.py",
    "tests/engine_compute/test_disk_tier.py",
    "tests/kv_transfer/test_protocol_machine.py",
    "tests/kv_transfer/test_lease_machine.py",
    "tests/kv_transfer/test_sender_messages.py",
)

_MIN_KILLS = 20
_ATTACK_SECONDS = 30.0
"""At ten requests a second p99 is the third worst of 300, which excludes one or two delays by the machine itself."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of the scenarios."""

    num_streams: int
    kill_seconds: float
    machine_factor: int
    num_schedules: int
    num_whole_runs: int
    num_walks: int
    num_moving_walks: int
    num_requests: int


def main() -> None:
    """Run everything, write the figures; the exit code is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-streams", type=int, default=200)
    parser.add_argument("--kill-seconds", type=float, default=180.0)
    parser.add_argument("--machine-factor", type=int, default=20)
    parser.add_argument("--num-schedules", type=int, default=2000)
    parser.add_argument("--num-whole-runs", type=int, default=60)
    parser.add_argument("--num-walks", type=int, default=50_000)
    parser.add_argument("--num-moving-walks", type=int, default=9000, help="each has 1.2 moves on average")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--only", help="run only the scenario of this name, or those whose names contain it")
    given = parser.parse_args()
    logging.getLogger("kv_transfer").setLevel(logging.ERROR)  # warnings about intended faults are of no use
    sizes = Sizes(
        given.num_streams,
        given.kill_seconds,
        given.machine_factor,
        given.num_schedules,
        given.num_whole_runs,
        given.num_walks,
        given.num_moving_walks,
        given.num_requests,
    )
    scenarios = {} if given.only is None else read_figures("soak")["scenarios"]
    scenarios |= run_all(sizes, given.only or "")
    figures = {
        "is_clean": all(scenario["is_clean"] for scenario in scenarios.values()),
        "scenarios": scenarios,
    }
    path = write_result("soak", figures)
    print(json.dumps(figures, indent=2), f"written to {path}", sep="\n")
    sys.exit(not figures["is_clean"])


def run_all(sizes: Sizes, only: str) -> dict[str, dict[str, Any]]:
    """Run the scenario of this name, or all whose names contain it; return their figures.

    A failure does not stop the others.
    """
    seed = str(chaos_seed())
    machines = f"{sizes.machine_factor}:{chaos_seed()}"
    scenarios: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        *((f"leaving over {name}", partial(leaving, name, sizes)) for name in TRANSPORTS),
        *((f"kills over {name}", partial(kills, name, sizes)) for name in TRANSPORTS),
        *(
            (f"kills of {model.name} over {name}", partial(kills, name, sizes, model, num_each=2))
            for model, name in OTHER_MODELS
        ),
        ("faults", partial(tests, "KVBATON_SOAK_SEED", seed, FAULTS)),
        ("short requests", partial(short_requests, sizes)),
        ("data-parallel groups", partial(groups, sizes)),
        ("transfer faults", partial(transfer_faults, "links", sizes.num_schedules)),
        (
            "transfer faults between namespaces",
            partial(transfer_faults, "namespaces", sizes.num_schedules // 10),
        ),
        ("whole workers under transfer faults", partial(whole_workers, sizes)),
        ("walks through the protocol", lambda: run_walks(WALKED, sizes.num_walks, chaos_seed())),
        (
            "moves through the protocol",
            lambda: run_walks(WALKED_WITH_MOVES, sizes.num_moving_walks, chaos_seed()),
        ),
        ("state machines", partial(tests, "KVBATON_SOAK", machines, MACHINES)),
        *((f"attack by {name.replace('_', ' ')}", partial(attack, name)) for name in WEAPONS),
    ]
    names = [name for name, _ in scenarios]
    chosen = {only} if only in names else {name for name in names if only in name}
    return {name: _timed(name, run, sizes) for name, run in scenarios if name in chosen}


def leaving(transport: str, sizes: Sizes) -> dict[str, Any]:
    """Run clients that leave in every phase."""
    name = f"leaving over {transport}"
    return _in_folder(
        lambda folder: run_leaving(
            folder, chaos_rng(name), transport=transport, num_streams=sizes.num_streams
        )
    )


def groups(sizes: Sizes) -> dict[str, Any]:
    """Run two groups of four ranks, prompts at one and answers at the other, with random arrivals."""
    rng = chaos_rng("groups")
    flags = ("--data-parallel-size", "4")
    return _in_folder(lambda folder: run_groups(folder, rng, *flags, num_requests=sizes.num_requests))


def kills(transport: str, sizes: Sizes, model: ChaosModel = DEMO, *, num_each: int = 3) -> dict[str, Any]:
    """Kill workers under load. num_each: the number of workers of each role."""
    rng = chaos_rng(f"kills of {model.name} over {transport}")
    seconds = sizes.kill_seconds
    return _in_folder(
        lambda folder: run_kills(
            folder,
            rng,
            transport=transport,
            seconds=seconds,
            model=model,
            num_each=num_each,
            min_kills=_MIN_KILLS,
        )
    )


def short_requests(sizes: Sizes) -> dict[str, Any]:
    """Send many small requests concurrently; none may fail."""
    rng = chaos_rng("short requests")
    return _in_folder(lambda folder: run_short_requests(folder, rng, num_requests=sizes.num_requests))


def attack(name: str) -> dict[str, Any]:
    """Run an attack on a whole service while another client uses it; the middle one of three if the first is slow.

    Two measured p99 of a machine with two processors differ by a factor of two at times, without an attack.
    """

    def run() -> dict[str, Any]:
        return _in_folder(lambda folder: run_attack(folder, name, sys.executable, _ATTACK_SECONDS))

    runs = [run()]
    if _is_slow_only(runs[0]):
        runs += [run(), run()]
    runs.sort(key=lambda one: float(one["p99_factor"]))
    chosen = next((one for one in runs if one["wrong"] and not _is_slow_only(one)), runs[len(runs) // 2])
    return {**chosen, "p99_factors": [round(one["p99_factor"], 2) for one in runs]}


def _is_slow_only(report: dict[str, Any]) -> bool:
    """Return True if an attack has done nothing but make others wait for longer than is allowed."""
    return report["p99_factor"] > MAX_P99_FACTOR and len(report["wrong"]) == 1


def transfer_faults(where: str, num_schedules: int) -> dict[str, Any]:
    """Run hand-overs between real processes, with real bytes and no model, under random faults.

    Between ``namespaces`` the kernel drops and delays packets, which needs root, iproute2 and ``sch_tbf``.
    """
    program = "tests.transfer_faults.program"
    ran = subprocess.run(
        [sys.executable, "-m", program, where, str(chaos_seed()), str(num_schedules)],
        cwd=Path(__file__).parents[1],
        env=process_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    report = json.loads(ran.stdout) if ran.stdout else {}
    return {**report, "is_clean": ran.returncode == 0}


def whole_workers(sizes: Sizes) -> dict[str, Any]:
    """Run the same faults on workers with a model and a router."""
    rng = chaos_rng("whole workers under transfer faults")
    return _in_folder(lambda folder: run_whole_workers(folder, rng, num_runs=sizes.num_whole_runs))


def tests(variable: str, value: str, paths: tuple[str, ...]) -> dict[str, Any]:
    """Run test modules in a separate process with one variable set."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--timeout=3600", "--show-capture=no", *paths],
        cwd=Path(__file__).parents[1],
        env=process_environment() | {variable: value},
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stderr.write(ran.stdout[-5000:] if ran.returncode else "")
    return {variable: value, "result": ran.stdout.splitlines()[-1], "is_clean": ran.returncode == 0}


def _in_folder(run: Callable[[Path], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvbaton-soak-") as folder:
        report: dict[str, Any] = asyncio.run(run(Path(folder))).as_dict()
    return {**report, "is_clean": not report["wrong"] and not report.get("failed")}


def _timed(name: str, run: Callable[[], dict[str, Any]], sizes: Sizes) -> dict[str, Any]:
    began = time.monotonic()
    try:
        figures = run()
    except (AssertionError, TimeoutError, ExceptionGroup) as error:
        figures = {"error": repr(error), "is_clean": False}
    sys.stderr.write(f"{name}: {'clean' if figures['is_clean'] else 'BROKEN'}\n")
    facts = {"commit": run_facts()["commit"], "seed": chaos_seed(), "sizes": asdict(sizes)}
    return {**facts, **figures, "duration_seconds": round(time.monotonic() - began)}


if __name__ == "__main__":
    main()
