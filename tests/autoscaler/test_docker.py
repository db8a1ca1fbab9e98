"""The launcher of containers on an engine that is played behind a real Unix socket."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.launchers.docker.engine import open_engine
from autoscaler.launchers.docker.launcher import DockerLauncher
from contract.errors import NotFoundError, UnavailableError
from contract.identity import Role
from tests.autoscaler.cases import D, P
from tests.autoscaler.played_engine import IMAGE, PROJECT, PlayedEngine, playing

GPU_PLACES = "1,2,3"


@asynccontextmanager
async def launcher_of(played: PlayedEngine, folder: Path) -> AsyncIterator[DockerLauncher]:
    async with playing(played, folder) as socket, open_engine(socket) as engine:
        yield DockerLauncher(engine, PROJECT)


def pair() -> PlayedEngine:
    """Return an engine with the containers of one worker of each role."""
    played = PlayedEngine()
    played.has("prefill")
    played.has("decode")
    return played


def worker(played: PlayedEngine, name: str) -> str:
    """Return the id of the worker in a container, as the entrypoint of the Compose file makes it."""
    facts = played.named(name)
    return f"{facts['Config']['Labels']['kvbaton.role']}-{facts['Config']['Hostname']}"


async def test_it_lists_the_workers_of_its_project_that_run(tmp_path: Path) -> None:
    played = pair()
    played.has("decode", 2)["State"]["Status"] = "restarting"
    played.has("decode", 3)["State"]["Status"] = "exited"
    for number, (label, value) in enumerate(
        {"project": "other", "oneoff": "True", "container-number": "x"}.items(), 4
    ):
        played.has("decode", number)["Config"]["Labels"][f"com.docker.compose.{label}"] = value
    played.has("decode", 9)["Config"]["Labels"]["kvbaton.role"] = "router"
    del played.has("decode", 10)["Config"]["Labels"]["kvbaton.role"]
    async with launcher_of(played, tmp_path) as launcher:
        assert sorted(await launcher.names()) == [
            (worker(played, "shop-decode-1"), D),
            (worker(played, "shop-decode-2"), D),
            (worker(played, "shop-prefill-1"), P),
        ]


async def test_a_new_container_is_a_copy_of_the_newest_one_of_its_role(tmp_path: Path) -> None:
    played = pair()
    newest = played.has("decode", 2)
    newest["Config"]["Env"].append("KVBATON_MODEL=/models/new")
    newest["Config"]["Labels"]["com.docker.compose.replace"] = "decode-1"
    before = copy.deepcopy(newest)
    async with launcher_of(played, tmp_path) as launcher:
        name = await launcher.add(D)
        made = played.named("shop-decode-3")
        assert played.states()["shop-decode-3"] == "running"
        assert name == worker(played, "shop-decode-3")
        assert (name, D) in await launcher.names()
    assert newest == before
    assert made["HostConfig"] == newest["HostConfig"]
    assert made["Image"] == made["Config"]["Image"] == IMAGE
    changed = {"Hostname", "Image", "Labels"}
    assert {k: v for k, v in made["Config"].items() if k not in changed} == {
        k: v for k, v in newest["Config"].items() if k not in changed
    }
    assert made["Config"]["Labels"] == {
        **{k: v for k, v in newest["Config"]["Labels"].items() if not k.endswith(".replace")},
        "com.docker.compose.container-number": "3",
    }
    aliases = made["NetworkSettings"]["Networks"]["shop_default"]["Aliases"]
    assert sorted(aliases) == sorted(["shop-decode-3", "decode", "workers", made["Id"][:12]])


async def test_a_container_on_two_networks_is_copied_onto_both(tmp_path: Path) -> None:
    """Engines before 25 connect a new container to one network only."""
    played = pair()
    networks = played.named("shop-decode-1")["NetworkSettings"]["Networks"]
    networks["fast"] = {"Aliases": ["shop-decode-1", "decode"]}
    async with launcher_of(played, tmp_path) as launcher:
        await launcher.add(D)
    made = played.named("shop-decode-2")["NetworkSettings"]["Networks"]
    assert made.keys() == {"shop_default", "fast"}
    assert made["fast"]["Aliases"] == ["shop-decode-2", "decode"]


async def test_a_launcher_that_is_started_again_adopts_all_and_knows_the_numbers(tmp_path: Path) -> None:
    played = pair()
    async with launcher_of(played, tmp_path) as launcher:
        first = await launcher.add(D)
    async with launcher_of(played, tmp_path) as launcher:
        assert (first, D) in await launcher.names()
        await launcher.add(D)
        assert "shop-decode-3" in played.states()
        await launcher.remove(first)
    assert "shop-decode-2" not in played.states()


async def test_a_start_that_was_interrupted_is_completed_and_nothing_is_created_twice(tmp_path: Path) -> None:
    """The autoscaler died between the creation of a container and its start."""
    played = pair()
    played.has("decode", 2)["State"]["Status"] = "created"
    async with launcher_of(played, tmp_path) as launcher:
        assert await launcher.add(D) == worker(played, "shop-decode-2")
    assert played.changes() == ["POST start shop-decode-2"]


async def test_a_name_that_another_container_has_is_skipped(tmp_path: Path) -> None:
    played = pair()
    stranger = played.has("decode", 2)
    stranger["Config"]["Labels"] = {}
    async with launcher_of(played, tmp_path) as launcher:
        assert await launcher.add(D) == worker(played, "shop-decode-3")
        for number in range(4, 14):
            played.has("decode", number)["Config"]["Labels"] = {}
        with pytest.raises(UnavailableError, match="have the names shop-decode-4 to 13"):
            await launcher.add(D)


async def test_a_missing_image_is_reported_and_nothing_is_left(tmp_path: Path) -> None:
    played = pair()
    played.images.clear()
    async with launcher_of(played, tmp_path) as launcher:
        with pytest.raises(NotFoundError, match=f"No such image: {IMAGE}"):
            await launcher.add(D)
    assert len(played.containers) == 2


async def test_a_new_container_that_cannot_start_is_deleted(tmp_path: Path) -> None:
    played = pair()
    played.broken = {"shop-decode-2"}
    async with launcher_of(played, tmp_path) as launcher:
        with pytest.raises(UnavailableError, match="could not select device driver"):
            await launcher.add(D)
    assert len(played.containers) == 2


async def test_a_container_that_dies_again_and_again_is_listed_until_it_is_removed(tmp_path: Path) -> None:
    """The law counts it as one that starts, and gives it up."""
    played = pair()
    async with launcher_of(played, tmp_path) as launcher:
        name = await launcher.add(D)
        played.named("shop-decode-2")["State"]["Status"] = "restarting"
        assert (name, D) in await launcher.names()
        await launcher.remove(name)
    assert "shop-decode-2" not in played.states()


async def test_without_a_container_to_copy_it_says_what_to_do(tmp_path: Path) -> None:
    played = PlayedEngine()
    played.has("prefill")
    async with launcher_of(played, tmp_path) as launcher:
        with pytest.raises(UnavailableError, match=r"no container of a decode worker .*docker compose up"):
            await launcher.add(D)


async def test_a_worker_on_gpus_takes_the_first_free_place_of_its_role(tmp_path: Path) -> None:
    """A worker that has taken the other role keeps its GPU, and so does one that is being stopped."""
    played = PlayedEngine()
    played.has("prefill", place=2, places="0,2")
    played.has("decode", place=1, places=GPU_PLACES)
    async with launcher_of(played, tmp_path) as launcher:
        added = await launcher.add(D)
        made = played.named("shop-decode-gpu-2")
        assert made["Config"]["Env"] == ["KVBATON_ROUTER=router:9100", "GPU_PLACE=3"]
        with pytest.raises(UnavailableError, match=r"all GPU places of decode workers \(1,2,3\) are taken"):
            await launcher.add(D)
        played.is_held = True
        leaving = asyncio.create_task(launcher.remove(added))
        await played.stops.wait()
        with pytest.raises(UnavailableError, match="are taken"):
            await launcher.add(D)
        played.let_end.set()
        await leaving
        assert await launcher.add(D) == worker(played, "shop-decode-gpu-2")
    assert played.named("shop-decode-gpu-2")["Config"]["Env"][-1] == "GPU_PLACE=3"


async def test_a_worker_is_stopped_with_its_own_grace_and_then_deleted(tmp_path: Path) -> None:
    played = pair()
    played.has("decode", 2)
    async with launcher_of(played, tmp_path) as launcher:
        played.is_held = True
        name = worker(played, "shop-decode-2")
        removing = asyncio.create_task(launcher.remove(name))
        await played.stops.wait()
        assert (name, D) not in await launcher.names()
        await launcher.remove(name)
        played.let_end.set()
        await removing
    assert played.changes() == ["POST stop shop-decode-2", "DELETE shop-decode-2"]


async def test_the_last_container_of_a_role_stays_to_be_started_or_copied(tmp_path: Path) -> None:
    played = pair()
    async with launcher_of(played, tmp_path) as launcher:
        name = worker(played, "shop-decode-1")
        await launcher.remove(name)
        assert played.states() == {"shop-prefill-1": "running", "shop-decode-1": "exited"}
        assert await launcher.add(D) == name
        assert await launcher.add(D) == worker(played, "shop-decode-2")


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_stopped_container_that_cannot_start_is_replaced_if_another_one_can_be_copied(
    tmp_path: Path, is_last: bool
) -> None:
    played = pair()
    name = "shop-decode-1" if is_last else "shop-decode-2"
    stopped = played.named(name) if is_last else played.has("decode", 2)
    stopped["State"]["Status"] = "exited"
    played.broken = {name}
    async with launcher_of(played, tmp_path) as launcher:
        if is_last:
            with pytest.raises(UnavailableError, match="could not select device driver"):
                await launcher.add(D)
            assert played.states()[name] == "exited"
        else:
            played.broken = {name}
            with pytest.raises(UnavailableError, match="could not select device driver"):
                await launcher.add(D)
            played.broken.clear()
            assert await launcher.add(D) == worker(played, "shop-decode-2")
            assert "DELETE shop-decode-2" in played.calls


async def test_a_worker_that_has_gone_is_removed_without_an_error(tmp_path: Path) -> None:
    played = pair()
    second = played.has("decode", 2)
    async with launcher_of(played, tmp_path) as launcher:
        await launcher.remove("decode-unknown")
        played.is_held = True
        removing = asyncio.create_task(launcher.remove(worker(played, "shop-decode-2")))
        await played.stops.wait()
        del played.containers[second["Id"]]
        played.let_end.set()
        await removing


async def test_an_engine_that_goes_away_is_an_error_with_its_socket_until_it_is_back(tmp_path: Path) -> None:
    played = pair()
    async with contextlib.AsyncExitStack() as opened:
        async with playing(played, tmp_path) as socket:
            engine = await opened.enter_async_context(open_engine(socket))
            launcher = DockerLauncher(engine, PROJECT)
            assert len(await launcher.names()) == 2
        for call in (launcher.names(), launcher.add(Role.DECODE), launcher.remove("decode-0")):
            with pytest.raises(UnavailableError, match=f"no Docker engine answers at {socket}"):
                await call
        async with playing(played, tmp_path):
            assert len(await launcher.names()) == 2


@pytest.mark.parametrize("there", ["nothing", "a file"])
async def test_a_socket_that_is_none_is_refused_at_the_start(tmp_path: Path, there: str) -> None:
    path = tmp_path / "docker.sock"
    if there == "a file":
        path.write_text("")
    with pytest.raises(UnavailableError, match=r"docker_socket must be the engine's socket.*DOCKER_GID"):
        async with open_engine(path):
            pass
