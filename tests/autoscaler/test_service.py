"""``kvbaton autoscaler`` on a real router with scripted workers, and an engine that is played behind a real Unix socket."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from autoscaler.service import serve
from autoscaler.timing_model import write_timing
from contract.errors import SettingError, UnavailableError
from launch.arguments import parse
from launch.service_settings import AutoscalerCommand
from tests.autoscaler.cases import TIMING
from tests.autoscaler.played_engine import PROJECT, PlayedEngine, playing
from tests.fakes.router.script import Script
from tests.private_files import write_private
from tests.router.cluster import PAIR, running_cluster
from tests.text.tiny_model import END


def settings(folder: Path, *flags: str) -> AutoscalerCommand:
    timing = folder / "timing.json"
    write_timing(timing, TIMING)
    given = ("--timing", str(timing), "--project", PROJECT, "--docker-socket", str(folder / "docker.sock"))
    pace = ("--admin", "127.0.0.1:0", "--scaling-interval-seconds", "0.1")
    return parse(AutoscalerCommand, "kvbaton autoscaler", [*given, *pace, *flags])


@asynccontextmanager
async def serving(given: AutoscalerCommand) -> AsyncIterator[str]:
    """Run the service with short waits, and end it by SIGTERM; yield the address of its pages."""
    ready = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(serve(given, ready.set_result))
    try:
        yield await ready
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    finally:
        running.cancel()


async def page(address: str, path: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
        return response.status, await response.json(content_type=None) if response.status != 404 else None


async def until_healthy(address: str, status: int) -> None:
    async with asyncio.timeout(30):
        while (await page(address, "/health"))[0] != status:
            await asyncio.sleep(0.02)


async def test_pools_below_their_least_number_get_containers_and_it_ends_by_sigterm(tmp_path: Path) -> None:
    played = PlayedEngine()
    for role in PAIR:
        played.has(role.value)
    keys = tmp_path / "keys"
    write_private(keys, "an-admin-key-of-a-test\n")
    router = running_cluster(Script(tokens=[END]), (), admin_keys_file=keys)
    async with playing(played, tmp_path), router as cluster:
        for role in PAIR:
            container = played.named(f"shop-{role.value}-1")
            await cluster.add(role, f"{role.value}-{container['Config']['Hostname']}")
        admin = cluster.service.addresses.admin
        flags = ("--prefill", "1", "--decode", "2:4", "--router-admin", admin)
        given = settings(tmp_path, *flags, "--admin-keys-file", str(keys))
        async with serving(given) as address:
            await until_healthy(address, 200)
            async with asyncio.timeout(30):
                while "shop-decode-2" not in played.states():
                    await asyncio.sleep(0.02)
            _, state = await page(address, "/debug/state")
            assert state["decision"]["pools"]["decode"]["desired"] == 2
            assert (await page(address, "/metrics"))[0] == 404
    assert played.states() == dict.fromkeys(("shop-prefill-1", "shop-decode-1", "shop-decode-2"), "running")


async def test_it_is_not_healthy_before_routers_answer(tmp_path: Path) -> None:
    given = settings(tmp_path, "--router-admin", "127.0.0.1:1")
    async with playing(PlayedEngine(), tmp_path), serving(given) as address:
        status, reply = await page(address, "/health")
    assert status == 503
    assert reply["reason"] == "there was no decision yet: routers or engine do not answer"


async def test_it_does_not_start_without_an_engine_or_with_contradictory_settings(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no Docker engine answers"):
        await serve(settings(tmp_path), print)
    with pytest.raises(SettingError, match="decode is '3:2': a range is LEAST:MOST"):
        await serve(settings(tmp_path, "--decode", "3:2"), print)
    with pytest.raises(SettingError, match="budget is 2"):
        await serve(settings(tmp_path, "--tensor-parallel-size", "2", "--budget", "2"), print)
    with pytest.raises(SettingError, match=r"timing file missing\.json"):
        await serve(settings(tmp_path, "--timing", "missing.json"), print)


async def test_an_unknown_launcher_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"^launcher is 'swarm'; choose one of docker$") as refused:
        await serve(settings(tmp_path, "--launcher", "swarm"), lambda _: None)
    assert refused.value.param == "launcher"


async def test_the_launcher_of_docker_is_the_default_and_has_that_name(tmp_path: Path) -> None:
    for flags in ((), ("--launcher", "docker")):
        with pytest.raises(UnavailableError, match="docker_socket must be the engine's socket"):
            await serve(settings(tmp_path, *flags), lambda _: None)
