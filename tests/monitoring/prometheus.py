"""A real Prometheus, of Debian's package ``prometheus``, for one test."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "prometheus"
_START_SECONDS = 30


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``."""
    found = shutil.which(name)
    assert found, f"{name} is missing: apt-get install --no-install-recommends prometheus"
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API. Fails with its error."""
        async with self.session.get(f"{self.url}/api/v1/{path}", params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now."""
        found: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return found

    async def until_up(self, num_targets: int) -> None:
        """Wait until so many targets are scraped without an error."""
        async with asyncio.timeout(_START_SECONDS):
            while len(await self.query("up == 1")) < num_targets:
                await asyncio.sleep(0.2)


def configuration(targets: Mapping[str, list[str]], interval: str) -> str:
    """Return docker/prometheus/prometheus.yml with given addresses, by job, instead of names of the compose network."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs.keys() == targets.keys()
    for name, job in jobs.items():
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": targets[name]}]
    return str(yaml.safe_dump(config))


@asynccontextmanager
async def running_prometheus(
    folder: Path, targets: Mapping[str, list[str]], interval: str = "500ms"
) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with our configuration and rules; stop it at the end."""
    config = folder / "prometheus.yml"
    config.write_text(configuration(targets, interval))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:
            server = Prometheus(f"http://{address}", session)
            await _wait_ready(server, process, folder / "prometheus.log")
            yield server
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _wait_ready(server: Prometheus, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(_START_SECONDS):
        while True:
            assert process.returncode is None, log.read_text()
            with suppress(aiohttp.ClientConnectionError):
                async with server.session.get(f"{server.url}/-/ready") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)
