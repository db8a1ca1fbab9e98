"""The router starts and answers where torch is not installed (DESIGN §1, law 9)."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from autoscaler.timing_model import write_timing
from contract.identity import Role
from tests.autoscaler.cases import TIMING
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.packaging.base_install import link_base_install
from tests.text.tiny_model import END, byte_ids, model_files

SECRET = "a secret of the tests, of 32 or more characters"
RUN = """
import sys
sys.path[:0] = [sys.argv.pop(1)]
for name in ("torch", "numpy", "zmq", "transformers"):
    try:
        __import__(name)
    except ImportError:
        continue
    sys.exit(name + " is here: this environment proves nothing")
from cli.main import main
sys.exit(main())
"""


@pytest.mark.e2e
async def test_a_router_without_torch_answers(tmp_path: Path) -> None:
    """`kvbaton router` from the base install alone; the model's files come from the first worker that attaches."""
    site, secret_file = tmp_path / "site", tmp_path / "secret"
    site.mkdir()
    assert "torch" not in link_base_install(site)
    secret_file.write_text(SECRET)
    secret_file.chmod(0o600)
    ports = ("--http", "--grpc", "--internal", "--admin")
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-S", "-c", RUN, str(site), "router", "--secret-file", str(secret_file)),
        *(argument for port in ports for argument in (port, "127.0.0.1:0")),
        *("--ready-fd", str(writer)),
        pass_fds=[writer],
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as ready:
            addresses = json.loads(await asyncio.to_thread(ready.readline))
        async with asyncio.timeout(60):
            assert await _answer(addresses) == "abc"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("top", "--once", "--admin", "127.0.0.1:1"), "no router answers at 127.0.0.1:1"),
        (
            ("autoscaler", "--timing", "{timing}", "--docker-socket", "/missing"),
            "no Docker engine answers at /missing",
        ),
    ],
)
def test_commands_for_a_service_need_no_torch(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """The image of the router has variables of the router, so each command there reads the names of all settings."""
    site, timing = tmp_path / "site", tmp_path / "timing.json"
    site.mkdir()
    link_base_install(site)
    write_timing(timing, TIMING)
    given = [argument.format(timing=timing) for argument in arguments]
    command = ["env", "KVBATON_HTTP=0.0.0.0:8000", sys.executable, "-I", "-S", "-c", RUN, str(site), *given]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 1
    assert f"kvbaton: {message}" in run.stderr


async def _answer(addresses: dict[str, str]) -> str:
    script = Script(tokens=[*byte_ids(b"abc"), END])
    worker = ScriptedWorker(
        Role.AGGREGATED, addresses["internal"], SECRET, lambda _: script, model_files=model_files()
    )
    async with worker, aiohttp.ClientSession() as session:
        while True:
            url = f"http://{addresses['http']}/v1/completions"
            async with session.post(url, json={"prompt": "x"}) as response:
                if response.status == 200:
                    return str((await response.json())["choices"][0]["text"])
                assert response.status == 503
            await asyncio.sleep(0.05)
