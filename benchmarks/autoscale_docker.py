"""``python -m benchmarks.autoscale_docker``: five minutes of ``benchmarks.autoscale_demo`` with workers in containers.

The load is an excerpt of the demo's, at the same pace. The images of this checkout are built, the file of ``kvbaton compose
--autoscale`` for the demo model is started, and everything is taken down at the end. Needs a Docker engine on this machine
with Compose v2. ``results/autoscale_docker.json`` has the figures. The exit code is 1 if a request had no whole answer, or
if something of the stack was left.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.autoscale_demo import measured, publish, use_running
from benchmarks.autoscale_figures import figures_of
from benchmarks.autoscale_load import FIVE_MINUTES, scaled
from benchmarks.autoscale_plan import WORKER_SETTINGS, Plan, planned
from benchmarks.autoscale_run import Recording
from benchmarks.facts import RESULTS, command_line
from cli.compose import compose
from launch.settings import variable
from serving.logs import configure_logs
from tests.docker.stack import Stack, docker, living, running_stack, socket_variables

_NAME = "autoscale_docker"
_MODEL = "demo"
_ADMIN_PORT = 9101
_PUBLISHED_ADMIN = f'services: {{router: {{ports: ["127.0.0.1:0:{_ADMIN_PORT}"]}}}}\n'
_DECISION = re.compile(r"(\d{4}-[\d:T.-]+) INFO \S+ autoscaler\.controller: (.* \| .*)$", re.MULTILINE)


def main() -> None:
    """Run the demo, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--timing", type=Path, help="timing file of this machine; measured without it")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    configure_logs("demo", "info")
    with tempfile.TemporaryDirectory(prefix="kvbaton-autoscale-") as folder:
        Path(folder).chmod(0o755)
        plan = planned(
            given.timing or measured(_MODEL, Path(folder)),
            scaled(FIVE_MINUTES, 60.0 * given.minutes),
            model=_MODEL,
            trace=None,
            seed=given.seed,
        )
        with demo_stack(plan, Path(folder)) as stack:
            recording = asyncio.run(run(plan, stack, Path(folder)))
            processes = stack.processes()
        left = {**stack.leftovers(), **({"processes": found} if (found := living(processes)) else {})}
    figures = {
        **figures_of(plan, recording),
        "command": command_line("benchmarks.autoscale_docker"),
        "left_after_down": sorted(left),
    }
    publish(figures, _NAME, given.results)
    sys.exit(bool(recording.errors or left))


@contextmanager
def demo_stack(plan: Plan, folder: Path) -> Iterator[Stack]:
    """Run the services of the plan, and publish the router's admin port, from which the pools are read."""
    timing_file = folder / "mounted.json"
    timing_file.write_bytes(plan.timing_file.read_bytes())
    timing_file.chmod(0o644)
    settings = plan.settings
    names = ("budget", "ttft_goal_ms", "itl_goal_ms")
    flags = {
        "prefill": f"{settings.prefill}:{settings.max_prefill}",
        "decode": f"{settings.decode}:{settings.max_decode}",
        "timing": timing_file,
        "output": folder / "compose.yaml",
        **{name: getattr(settings, name) for name in names},
    }
    compose(["--autoscale", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())])
    override = folder / "admin.yaml"
    override.write_text(_PUBLISHED_ADMIN)
    environment = (f"{variable(name)}={getattr(settings, name)}" for name in WORKER_SETTINGS)
    files = f"COMPOSE_FILE={folder / 'compose.yaml'}:{override}"
    with running_stack(files, *environment, *socket_variables()) as stack:
        yield stack


async def run(plan: Plan, stack: Stack, folder: Path) -> Recording:
    """Send the load, and return what happened, with the decisions that the autoscaler's container logged."""
    (router,) = stack.containers("router")
    key_file = folder / "keys"
    key_file.touch(mode=0o600)
    key_file.write_text(docker("exec", router, "cat", "/run/kvbaton/admin/keys"))
    service = f"http://{stack.published(8000)}"
    recording = await use_running(plan, service, stack.published(_ADMIN_PORT), key_file)
    begin = time.time() - recording.now
    log = stack.compose("logs", "--no-color", "--no-log-prefix", "autoscaler")
    recording.decisions += decisions_in(log, begin)
    return recording


def decisions_in(log: str, begin: float) -> list[tuple[float, str]]:
    """Return the decisions in the log of an autoscaler, with the seconds since ``begin``."""
    found = []
    for line in _DECISION.finditer(log):
        logged = datetime.fromisoformat(line[1]).replace(tzinfo=UTC).timestamp()
        found.append((round(logged - begin, 1), line[2]))
    return found


if __name__ == "__main__":
    main()
