"""``python -m benchmarks.autoscale_demo`` (``make autoscale-demo``): the pools of a service follow a load for 15 minutes.

First ``kvbaton bench --profile`` measures this machine (or ``--timing FILE``). Then a service of the demo model starts with
one prefill and one decode worker; at most two of each, and three together, may run. The load consists of windows of Azure's
code trace, scaled to the model and to what one worker can do here: it grows and falls, rises to four times for a minute, and
then consists of long answers, for which a worker changes its role. With ``--service`` and ``--admin`` a running service
gets the load, whose autoscaler must have the timing file, the goals and the bounds that ``--show`` prints.
``results/autoscale_demo.json`` has the figures, with those of the simulation of the same load by the same law; ``.png`` is
the picture, if matplotlib is installed. The exit code is 1 if a request had no whole answer.
"""

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from autoscaler.scaled_cluster import run_scaled
from benchmarks.autoscale_figures import figures_of
from benchmarks.autoscale_load import LONGEST_PROMPT, PHASES, scaled
from benchmarks.autoscale_picture import draw
from benchmarks.autoscale_plan import KV_BYTES, MAX_SEQUENCES, STEP_TOKENS, WORKER_SETTINGS, Plan, planned
from benchmarks.autoscale_run import Recording, record
from benchmarks.facts import RESULTS, write_result
from cli.ask import served_model
from cli.endpoint import Endpoint, local_endpoint
from launch.kept_process import Facts
from launch.processes import ROUTER
from launch.router_admin import RouterAdmin, admin_session
from serving.api_keys import first_key
from serving.logs import configure_logs

_NAME = "autoscale_demo"
_START_SECONDS = 12.0
_PROFILE_ROUNDS = 6
"""The goals and the whole load follow from the profile."""


def main() -> None:
    """Run the demo, write and draw its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--timing", type=Path, help="timing file of this machine; measured without it")
    parser.add_argument(
        "--trace", type=Path, help="whole trace in Azure's form; the committed windows without it"
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--service", help="HTTP address of a running service, http://HOST:PORT")
    parser.add_argument("--admin", help="admin address of its router, HOST:PORT")
    parser.add_argument("--admin-keys-file", type=Path, help="file with an admin key of the router")
    parser.add_argument("--show", action="store_true", help="print goals and bounds of the service, and end")
    parser.add_argument("--name", default=_NAME, help="name of the written files")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    if (given.service is None) is not (given.admin is None):
        parser.error("give --service and --admin together")
    configure_logs("demo", "info")
    with tempfile.TemporaryDirectory(prefix="kvbaton-autoscale-") as folder:
        plan = planned(
            given.timing or measured(given.model, Path(folder)),
            scaled(PHASES, 60.0 * given.minutes),
            model=given.model,
            trace=given.trace,
            seed=given.seed,
        )
        if given.show:
            sys.stdout.write(f"{json.dumps(shown(plan), indent=2)}\n")
            return
        if given.service:
            recording = asyncio.run(use_running(plan, given.service, given.admin, given.admin_keys_file))
        else:
            recording = run(plan)
    publish(figures_of(plan, recording), given.name, given.results)
    sys.exit(bool(recording.errors))


def publish(figures: dict[str, Any], name: str, results: Path) -> None:
    """Write, print and draw the figures."""
    has_picture = importlib.util.find_spec("matplotlib") is not None
    path = write_result(name, {**figures, "has_picture": has_picture}, results)
    printed = {key: value for key, value in figures.items() if key not in ("samples", "timing")}
    sys.stdout.write(f"{json.dumps(printed, indent=2)}\n{path}\n")
    if has_picture:
        draw(figures, results / f"{name}.png")
    else:
        sys.stderr.write("there is no picture: pip install 'kvbaton[benchmarks]'\n")


def shown(plan: Plan) -> dict[str, Any]:
    """Return what a service must be started with, and what the load is."""
    settings = plan.settings
    names = ("prefill", "max_prefill", "decode", "max_decode", "budget", "ttft_goal_ms", "itl_goal_ms")
    return {
        "settings": {name: getattr(settings, name) for name in (*names, *WORKER_SETTINGS)},
        "requests": len(plan.load),
        "seconds": plan.seconds,
    }


def measured(model: str, folder: Path) -> Path:
    """Measure this machine as a user would, and return the timing file."""
    path = folder / "timing.json"
    flags = {
        "--model": model,
        "--prefill": 1,
        "--decode": 1,
        "--prefill-nice": 0,
        "--num-threads": 1,
        "--max-num-seqs": MAX_SEQUENCES,
        "--max-num-batched-tokens": STEP_TOKENS,
        "--kv-cache-bytes": KV_BYTES,
        "--longest-prompt": LONGEST_PROMPT,
        "--rounds": _PROFILE_ROUNDS,
        "--start-seconds": _START_SECONDS,
        "--output": path,
    }
    command = [sys.executable, "-m", "cli.main", "bench", "--profile"]
    subprocess.run([*command, *(str(part) for pair in flags.items() for part in pair)], check=True)
    return path


def run(plan: Plan) -> Recording:
    """Start the service, send the load, stop the service."""
    recordings: list[Recording] = []

    async def use(facts: dict[str, Facts], _: asyncio.Event) -> None:
        endpoint = local_endpoint(plan.settings, facts[ROUTER])
        model = await served_model(endpoint)
        async with admin_session(None) as session:
            router = RouterAdmin(facts[ROUTER]["admin"], session)
            recordings.append(await record(endpoint.url, model, router, plan.load, plan.seed))

    run_scaled(plan.settings, use)
    if not recordings:
        sys.exit("stopped before the end of the load")
    return recordings[0]


async def use_running(plan: Plan, service: str, admin: str, key_file: Path | None) -> Recording:
    """Send the load to a running service. key_file: has an admin key of its router; None: it needs none."""
    base = service.rstrip("/")
    model = await served_model(Endpoint(base))
    async with admin_session(first_key(None, key_file)) as session:
        return await record(base, model, RouterAdmin(admin, session), plan.load, plan.seed)


if __name__ == "__main__":
    main()
