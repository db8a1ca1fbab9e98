"""Every wait of every command ends at a signal: at a named stage of its start, its work and its end.

The process has a session and a temporary folder of its own: after its end no process is left in the one, and nothing in the
other.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from _pytest.mark import ParameterSet

from cli.main import COMMANDS
from tests.chaos.settings import chaos_rng, process_environment
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.e2e

BOUND_SECONDS = 60.0
"""Time in which a command ends after a signal, on a busy machine."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FREE_PORTS = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0")


@dataclass
class Started:
    """A command in a session of its own. folder: its temporary folder."""

    process: asyncio.subprocess.Process
    folder: Path
    suspended: list[psutil.Process] = field(default_factory=list)

    def session(self) -> list[psutil.Process]:
        """Return all living processes of the session, orphans included."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = os.getsid(process.pid) == self.process.pid
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def has_loaded(self, module: str) -> bool:
        """Return True if an extension module is mapped into the command's process."""
        return module in Path(f"/proc/{self.process.pid}/maps").read_text()

    def suspend_engine(self) -> bool:
        """Stop an engine that loads its model, so that it would never be ready; return False if there is none yet."""
        for process in self.session():
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:
                continue
            if "--multiprocessing-fork" in words:
                process.suspend()
                self.suspended.append(process)
                return True
        return False

    def resume(self) -> None:
        """Let the suspended engines go on."""
        for process in self.suspended:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    async def reach(self, stage: Callable[["Started"], bool]) -> None:
        """Wait until the command is at a stage. It must not end before."""
        while not stage(self):
            assert self.process.returncode is None, await self.errors()
            await asyncio.sleep(0.01)

    async def errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def end(self, number: signal.Signals) -> tuple[int, str]:
        """Send a signal to the command; return its exit code and its errors. Nothing of it is left."""
        self.process.send_signal(number)
        async with asyncio.timeout(BOUND_SECONDS):
            _, errors = await self.process.communicate()
            while self.session():  # a process that the kernel kills with its parent takes a moment
                await asyncio.sleep(0.01)
        assert self.process.returncode is not None
        assert [path.name for path in self.folder.iterdir()] == [], errors.decode()
        return self.process.returncode, errors.decode()


@asynccontextmanager
async def started(folder: Path, words: Sequence[str], **environment: str) -> AsyncIterator[Started]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**process_environment(), "TMPDIR": str(folder), "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )
    running = Started(process, folder)
    try:
        yield running
    finally:
        for one in running.session():
            one.kill()
        await process.wait()


def command(name: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "cli.main", name, *arguments)


def expected(name: str, number: signal.Signals) -> int:
    """Return the documented exit code of a command that a signal ends before its work is done."""
    return 0 if COMMANDS[name].is_service else 128 + number


@dataclass(frozen=True)
class Files:
    """The files that the commands get. model: a tiny one, which no other test uses."""

    model: Path
    secret: Path
    batch: Path

    def arguments(self, name: str) -> tuple[str, ...]:
        """Return a command line with which the command would run for long, if it could."""
        model = ("--model", str(self.model))
        output = str(self.batch.parent / "output")
        worker = (*model, "--secret-file", str(self.secret), "--router", "127.0.0.1:1")
        return {
            "up": (*model, *FREE_PORTS),
            "serve": (str(self.model), *FREE_PORTS),
            "demo": (*model, *FREE_PORTS),
            "chat": model,
            "run": ("hello", *model),
            "batch": ("-i", str(self.batch), "-o", output, *model),
            "bench": ("--profile", *model, "--output", output),
            "check": (str(self.model),),
            "compose": ("--output", output, *model),
            "workers": ("--admin", "127.0.0.1:1"),
            "top": ("--admin", "127.0.0.1:1"),
            "router": ("--secret-file", str(self.secret), *FREE_PORTS),
            "prefill": worker,
            "decode": worker,
            "both": worker,
            "autoscaler": ("--project", "nothing", "--router-admin", "127.0.0.1:1"),
        }[name]


def with_each_signal(names: Iterable[str]) -> list[ParameterSet]:
    """Return each name with each signal; half of them are slow tests."""
    found = []
    for index, name in enumerate(names):
        found.append(pytest.param(name, SIGNALS[index % 2]))
        found.append(pytest.param(name, SIGNALS[(index + 1) % 2], marks=pytest.mark.slow))
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("files")
    secret = folder / "secret"
    secret.write_text("a secret of the tests, of 32 or more characters")
    secret.chmod(0o600)
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "batch.jsonl").write_text(json.dumps(line) + "\n")
    return Files(make_checkpoint(folder / "model"), secret, folder / "batch.jsonl")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder for a command, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="signal-") as path:
        yield Path(path)


@pytest.mark.parametrize(("name", "number"), with_each_signal(COMMANDS))
async def test_a_signal_ends_a_command_that_is_still_importing(
    files: Files, folder: Path, name: str, number: signal.Signals
) -> None:
    async with started(folder, command(name, *files.arguments(name))) as running:
        await running.reach(lambda it: it.has_loaded("_pydantic_core"))
        code, errors = await running.end(number)
    assert code == expected(name, number), errors
    assert "Traceback" not in errors


EXEC = "def run(arguments): exec('raise KeyboardInterrupt')"
WRAPS = """
import os, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(60)
except BaseException as error:
    raise ValueError(f"building a class: {{error!r}}") from None
"""


def ended(folder: Path, code: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command whose module has this code."""
    (folder / "interrupted.py").write_text(code)
    (folder / "started.py").write_text(
        "from cli.main import COMMANDS, Command\n"
        "from cli.main import main\n"
        "COMMANDS['run'] = Command('interrupted:run', '', '')\n"
        "main()\n"
    )
    words = [sys.executable, "-m", "started", "run"]
    environment = process_environment()
    environment["PYTHONPATH"] = f"{environment.get('PYTHONPATH', '')}:{folder}"
    return subprocess.run(words, env=environment, capture_output=True, timeout=BOUND_SECONDS)


def test_an_interrupt_in_generated_code_ends_with_the_documented_code(tmp_path: Path) -> None:
    """Dataclasses run generated code while they are imported. CPython remembers an interrupt there, even a caught one."""
    found = ended(tmp_path, EXEC)
    assert found.returncode == expected("run", signal.SIGINT), found.stderr


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_native_code_turns_into_an_error_is_a_signal(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Pydantic, which builds classes while a command is imported, raises a SchemaError for whatever interrupts it."""
    found = ended(tmp_path, WRAPS.format(number=number.value))
    assert (found.returncode, found.stderr) == (expected("run", number), b"")


STAGES: dict[str, Callable[[Started], bool]] = {
    "the cluster's secret is written": lambda it: any(it.folder.glob("kvbaton-secret-*")),
    "the first process is started": lambda it: len(it.session()) > 1,
    "an engine loads its model": Started.suspend_engine,
}
LOCAL = ("up", "serve", "demo", "chat", "run", "batch", "bench")
"""Commands that start a service on this machine."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", LOCAL)
async def test_a_signal_ends_a_service_that_starts(files: Files, folder: Path, name: str, stage: str) -> None:
    number = SIGNALS[(LOCAL.index(name) + list(STAGES).index(stage)) % 2]
    async with started(folder, command(name, *files.arguments(name))) as running:
        await running.reach(STAGES[stage])
        code, errors = await running.end(number)
    assert code == expected(name, number), errors
    assert "Traceback" not in errors


@pytest.mark.slow
async def test_a_signal_at_any_moment_of_a_start_ends_a_service_and_leaves_nothing(files: Files) -> None:
    """Moments are drawn, and differ from run to run; before the command's own code runs, Python or the signal ends it."""
    rng = chaos_rng("signals")
    for _ in range(6):
        name, number, moment = rng.choice(LOCAL), rng.choice(SIGNALS), rng.uniform(0, 10)
        what = f"{name}, {number.name} after {moment:.3f} s"
        with tempfile.TemporaryDirectory(prefix="signal-") as folder:
            async with started(Path(folder), command(name, *files.arguments(name))) as running:
                with suppress(TimeoutError):
                    await asyncio.wait_for(running.process.wait(), moment)
                if (
                    running.process.returncode is not None
                ):  # a quick machine has done the work before the signal
                    errors = await running.errors()
                    assert not COMMANDS[name].is_service and "Traceback" not in errors, f"{what}: {errors}"
                    assert list(Path(folder).iterdir()) == [], what
                    continue
                code, errors = await running.end(number)
        assert code == expected(name, number) or (code == -number and moment < 1), f"{what}: {code}, {errors}"
        assert "Traceback" not in errors or code == -number, f"{what}: {errors}"


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_to_the_whole_session_drains_a_service(
    files: Files, folder: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Service managers signal all processes of a unit: engines must outlive the workers' drain."""
    ready = tmp_path / "ready.json"
    words = command("up", *files.arguments("up"), "--ready-file", str(ready))
    async with started(folder, words) as running:
        await running.reach(lambda _: ready.exists())
        for process in running.session():
            if process.pid != running.process.pid:
                with suppress(psutil.NoSuchProcess):  # a helper of the start, which has ended since
                    process.send_signal(number)
        code, errors = await running.end(number)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "ERROR" not in errors


@asynccontextmanager
async def silent_server() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Listen, and never answer. Yields the address, and an event that the first connection sets."""
    asked = asyncio.Event()

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        try:
            await reader.read()
        finally:
            writer.close()

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0, family=socket.AF_INET) as server:
        host, port = server.sockets[0].getsockname()
        yield f"{host}:{port}", asked


ASKING: dict[str, Callable[[Files, str], tuple[str, ...]]] = {
    "run": lambda files, address: ("hello", "--url", address),
    "chat": lambda files, address: ("--url", address),
    "batch": lambda files, address: ("-i", str(files.batch), "-o", f"{files.batch}.out", "--url", address),
    "bench": lambda files, address: ("--profile", "--url", address, "--admin", address),
    "workers": lambda files, address: ("--admin", address),
    "top": lambda files, address: ("--admin", address),
    "check": lambda files, address: ("org/model",),
    "up": lambda files, address: ("--model", "org/model", *FREE_PORTS),
    "compose": lambda files, address: ("--model", "org/model", "--output", f"{files.batch}.yaml"),
    "both": lambda files, address: ("--model", "org/model", "--secret-file", str(files.secret)),
}
"""Commands that wait for a server: a service's answer, an operator's list, or the download of a model."""


@pytest.mark.parametrize(("name", "number"), with_each_signal(ASKING))
async def test_a_signal_ends_a_wait_for_a_server(
    files: Files, folder: Path, tmp_path: Path, name: str, number: signal.Signals
) -> None:
    async with silent_server() as (address, asked):
        hub = {"HF_ENDPOINT": f"http://{address}", "HF_HOME": str(tmp_path / "hub")}
        words = command(name, *ASKING[name](files, address))
        async with started(folder, words, **hub) as running:
            await running.reach(lambda _: asked.is_set())
            code, errors = await running.end(number)
    assert code == expected(name, number), errors
    assert "Traceback" not in errors


LOADS = "from kvbaton import LLM\nif __name__ == '__main__':\n    LLM({model!r})\n"
ASKS = "from kvbaton_client import Client\nClient({address!r}).generate('hello')\n"


async def test_ctrl_c_ends_a_program_whose_model_loads(files: Files, folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOADS.format(model=str(files.model)))
    async with started(folder, (str(program),)) as running:
        await running.reach(Started.suspend_engine)
        code, errors = await running.end(signal.SIGINT)
    assert (code, errors.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


async def test_ctrl_c_ends_a_client_that_waits_for_a_silent_service(folder: Path) -> None:
    async with silent_server() as (address, asked):
        words = ("-c", ASKS.format(address=address))
        async with started(folder, words) as running:
            await running.reach(lambda _: asked.is_set())
            code, errors = await running.end(signal.SIGINT)
    assert (code, errors.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


@pytest.mark.slow
async def test_the_next_start_removes_what_a_killed_one_has_left(files: Files, folder: Path) -> None:
    words = command("up", *files.arguments("up"))
    async with started(folder, words) as running:
        await running.reach(Started.suspend_engine)
        running.process.kill()
        running.resume()
        async with asyncio.timeout(BOUND_SECONDS):
            await running.process.wait()
            while running.session():
                await asyncio.sleep(0.01)
    kinds = ("kvbaton-secret-*", "kvbaton-engine-*")
    left = {path.name for kind in kinds for path in folder.glob(kind)}
    assert len(left) >= 2
    async with started(folder, words) as running:
        await running.reach(Started.suspend_engine)
        assert left.isdisjoint(path.name for path in folder.iterdir())
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), BOUND_SECONDS) == 0
