"""Copies of GPU workers on an engine without GPUs: the CPU image, with the places and namespaces of the profile gpu."""

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from autoscaler.launchers.docker.engine import open_engine
from autoscaler.launchers.docker.launcher import DockerLauncher, place_of
from autoscaler.timing_model import write_timing
from contract.errors import UnavailableError
from contract.identity import Role
from tests.autoscaler.cases import TIMING
from tests.docker.composed import ON_CPU, written
from tests.docker.loaded import attached, router_states, until
from tests.docker.stack import PROJECT, Stack, docker, engine_socket, running_stack, socket_variables

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    override = folder / "cpu.yaml"
    override.write_text(ON_CPU)
    write_timing(folder / "timing.json", msgspec.structs.replace(TIMING, start_seconds=600.0))
    flags = ("--autoscale", "--timing", str(folder / "timing.json"))
    path = written(folder, *flags, "--prefill-devices", "0", "--decode-devices", "1-3")
    variables = ("COMPOSE_PROFILES=gpu", f"COMPOSE_FILE={path}:{override}", "KVBATON_NUM_THREADS=1")
    with running_stack(*variables, *socket_variables()) as running:
        yield running


def namespaces_of(container: str) -> list[str]:
    return docker("exec", container, "readlink", "/proc/self/ns/pid", "/proc/self/ns/ipc").split()


async def test_copies_take_the_free_places_and_join_the_namespaces(stack: Stack) -> None:
    stack.compose("stop", "autoscaler")  # on a slow machine it would give up workers that start
    async with open_engine(engine_socket()) as engine:
        launcher = DockerLauncher(engine, PROJECT)
        before = set(await launcher.names())
        assert len(before) == 2
        added = [await launcher.add(Role.DECODE) for _ in range(2)]
        with pytest.raises(UnavailableError, match=r"\(1,2,3\) are taken"):
            await launcher.add(Role.DECODE)
        assert set(await launcher.names()) == before | {(name, Role.DECODE) for name in added}
        await until(lambda: attached(router_states(stack)[0]) == 4)
        workers = stack.inspect("decode-gpu")
        assert sorted(str(place_of(facts)) for facts in workers) == ["1", "2", "3"]
        [owner] = stack.containers("namespaces")
        assert all(namespaces_of(facts["Id"]) == namespaces_of(owner) for facts in workers)
        await asyncio.gather(*(launcher.remove(name) for name in added))
        assert set(await launcher.names()) == before
    assert len(stack.inspect("decode-gpu")) == 1
