"""Runs docker/compose.yaml like a user: `docker compose` in that folder, HTTP and gRPC on the published ports."""

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docker"
PROJECT = "kvbaton-test"
VARIABLES = ("COMPOSE_PROFILES=cpu", "HTTP_PORT=0", "GRPC_PORT=0")
BUILD_SECONDS = 1800
UP_SECONDS = 180
COMMAND_SECONDS = 60
_READ = """
import socket, sys, urllib.request
url = f"http://{socket.gethostname()}:9101{sys.argv[1]}"
print(urllib.request.urlopen(url, timeout=10).read().decode())
"""
_WAIT_FOR_REQUEST = """
import json, socket, time, urllib.request
url = f"http://{socket.gethostname()}:9101/debug/state"
print("watching", flush=True)
while not json.load(urllib.request.urlopen(url, timeout=10))["num_accepted"]:
    time.sleep(0.01)
"""
_BEGINS = """
import sys
for pid in sys.argv[1:]:
    try:
        with open(f"/proc/{pid}/stat") as file:
            print(pid, file.read().rpartition(")")[2].split()[19])
    except OSError:
        pass
"""


def docker(*arguments: str, timeout_seconds: float = COMMAND_SECONDS, variables: Sequence[str] = ()) -> str:
    """Run one docker command in docker/ with ``NAME=VALUE`` variables; return its output. Raises AssertionError."""
    result = subprocess.run(
        ["env", *variables, "docker", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    told = f"{result.stdout[-4000:]}{result.stderr[-4000:]}"
    assert result.returncode == 0, f"docker {' '.join(arguments)}:\n{told}"
    return result.stdout


def require_engine() -> None:
    """Fail with advice if there is no engine, which these tests need."""
    try:
        result = subprocess.run(
            ["docker", "info"], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        problem = result.stderr.strip() if result.returncode else ""
    except FileNotFoundError:
        problem = "there is no `docker` on the PATH"
    if problem:
        raise AssertionError(
            f"make test-docker needs a Docker engine with Compose v2 (start it, or set DOCKER_HOST): {problem}"
        )


def engine_socket() -> Path:
    """Return the path of the engine's Unix socket."""
    host = docker("context", "inspect", "-f", "{{.Endpoints.docker.Host}}").strip()
    assert host.startswith("unix://"), host
    return Path(host.removeprefix("unix://"))


def socket_variables() -> tuple[str, str]:
    """Return the variables that give the engine's socket to an autoscaler."""
    socket = engine_socket()
    return f"DOCKER_SOCKET={socket}", f"DOCKER_GID={socket.stat().st_gid}"


@contextmanager
def watched_exits(service: str, folder: Path) -> Iterator[Callable[[], list[int]]]:
    """Yield a function that returns the exit codes of a service's containers that have ended since then.

    Events are read as they come: the engine keeps the last 256 only, and every health check makes three.
    """
    since = docker("info", "--format", "{{.SystemTime}}").strip()
    wanted = (
        "event=die",
        f"label=com.docker.compose.project={PROJECT}",
        f"label=com.docker.compose.service={service}",
    )
    filters = (f"--filter={each}" for each in wanted)
    told = folder / "events"
    with told.open("wb") as out:
        reading = subprocess.Popen(
            ["docker", "events", "--since", since, *filters, "--format", "{{json .}}"], stdout=out
        )
    try:
        yield lambda: [
            int(json.loads(line)["Actor"]["Attributes"]["exitCode"]) for line in told.read_text().splitlines()
        ]
    finally:
        reading.terminate()
        reading.wait()


class Stack:
    """The compose project of the tests, with the profile ``cpu``, ports that the engine picks, and more ``variables``."""

    def __init__(self, variables: Sequence[str] = ()) -> None:
        self._variables = (*VARIABLES, *variables)

    def compose(self, *arguments: str, timeout_seconds: float = COMMAND_SECONDS) -> str:
        """Run one `docker compose` command of the project and return its output."""
        command = ("compose", "-p", PROJECT, *arguments)
        return docker(*command, timeout_seconds=timeout_seconds, variables=self._variables)

    def up(self, *arguments: str) -> None:
        """Start stopped services, and wait until every service is healthy."""
        try:
            self.compose("up", "-d", "--wait", *arguments, timeout_seconds=UP_SECONDS)
        except AssertionError as error:
            error.add_note(self.compose("logs", "--no-color", "--tail", "20"))
            raise

    def down(self) -> None:
        """Stop and remove everything, the volumes too."""
        self.compose("down", "-v", "--remove-orphans", timeout_seconds=UP_SECONDS)

    def published(self, port: int, number: int = 1, service: str = "router") -> str:
        """Return the published address of a port of the router, or other service, with this number, as "host:port"."""
        return self.compose("port", "--index", str(number), service, str(port)).strip()

    def containers(self, service: str) -> list[str]:
        """Return the ids of the running containers of a service."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, *arguments: str) -> list[dict[str, Any]]:
        """Return `docker inspect` of all containers of the project, including ended ones; ``arguments`` go to `ps`."""
        ids = self.compose("ps", "-a", "-q", *arguments).split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return found

    def leftovers(self) -> dict[str, str]:
        """Return the project's containers, networks and volumes that still exist."""
        label = f"label=com.docker.compose.project={PROJECT}"
        listed = {
            "containers": docker("ps", "-aq", "--filter", label),
            "networks": docker("network", "ls", "-q", "--filter", label),
            "volumes": docker("volume", "ls", "-q", "--filter", label),
        }
        return {name: ids for name, ids in listed.items() if ids.strip()}

    def processes(self) -> set[str]:
        """Return the processes in the project's containers, each as its number on the engine's machine and its start."""
        containers = self.compose("ps", "-q").split()
        return begun([pid for each in containers for pid in docker("top", each, "-eo", "pid").split()[1:]])


def begun(pids: Iterable[str]) -> set[str]:
    """Return those of the processes with these numbers on the engine's machine that run, with their starts."""
    alone = ("--rm", "--pid", "host", "--network", "none", "--entrypoint", "python")
    return set(docker("run", *alone, "kvbaton-router", "-c", _BEGINS, *pids).splitlines())


def living(processes: Iterable[str]) -> set[str]:
    """Return those of the processes of a stack that still run."""
    processes = set(processes)
    return processes & begun(process.split()[0] for process in processes)


def admin_page(container: str, path: str) -> str:
    """Fetch a page of the admin port of a container, inside it."""
    return docker("exec", container, "python", "-c", _READ, path)


def debug_state(container: str) -> dict[str, Any]:
    """A container's /debug/state."""
    state: dict[str, Any] = json.loads(admin_page(container, "/debug/state"))
    return state


@contextmanager
def watched(containers: Sequence[str]) -> Iterator[Callable[[], list[str]]]:
    """Give a function that waits until one of these workers has a request, and returns those that have.

    Processes in the containers watch from the start: beginning one takes longer than many streams.
    """
    command = ("python", "-c", _WAIT_FOR_REQUEST)
    watchers = dict[str, subprocess.Popen[str]]()
    with ExitStack() as stack:
        for each in containers:
            watcher = subprocess.Popen(["docker", "exec", each, *command], stdout=subprocess.PIPE, text=True)
            watchers[each] = stack.enter_context(watcher)
            stack.callback(watcher.kill)
        for watcher in watchers.values():
            assert watcher.stdout is not None
            assert watcher.stdout.readline() == "watching\n"

        def wait() -> list[str]:
            for _ in range(100 * COMMAND_SECONDS):
                if busy := [each for each, watcher in watchers.items() if watcher.poll() == 0]:
                    return busy
                time.sleep(0.01)
            raise AssertionError("no worker had a request")

        yield wait


@contextmanager
def running_stack(*variables: str) -> Iterator[Stack]:
    """The stack, built from this checkout and ready to answer; taken down with all its volumes at the end."""
    require_engine()
    stack = Stack(variables)
    stack.down()
    try:
        stack.compose("build", timeout_seconds=BUILD_SECONDS)
        stack.up()
        yield stack
    finally:
        stack.down()
