"""The profile gpu on an engine without GPUs: the workers of the CPU image in the namespaces that GPU workers share."""

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

from tests.docker.composed import ON_CPU
from tests.docker.stack import Stack, docker, running_stack

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    file = tmp_path_factory.mktemp("compose") / "cpu.yaml"
    file.write_text(ON_CPU)
    with running_stack("COMPOSE_PROFILES=gpu", f"COMPOSE_FILE=compose.yaml:{file}") as running:
        yield running


def namespaces_of(stack: Stack, service: str) -> list[str]:
    [container] = stack.containers(service)
    return docker("exec", container, "readlink", "/proc/self/ns/pid", "/proc/self/ns/ipc").split()


def answer(stack: Stack) -> str:
    request = Request(
        f"http://{stack.published(8000)}/v1/completions",
        json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def test_workers_share_their_namespaces_and_nobody_else_does(stack: Stack) -> None:
    shared = namespaces_of(stack, "namespaces")
    assert namespaces_of(stack, "prefill-gpu") == namespaces_of(stack, "decode-gpu") == shared
    assert not set(namespaces_of(stack, "router")) & set(shared)


def test_the_death_of_one_worker_is_not_that_of_another(stack: Stack) -> None:
    """Each container has its own processes, though all of them are in one namespace."""
    expected = answer(stack)
    [prefill], [decode] = stack.containers("prefill-gpu"), stack.containers("decode-gpu")
    before = docker("inspect", "-f", "{{.State.Pid}}", prefill)
    docker("kill", decode)
    stack.up("--no-recreate")
    assert docker("inspect", "-f", "{{.State.Pid}}", prefill) == before
    assert answer(stack) == expected


def test_workers_are_replaced_in_the_namespaces_that_stay(stack: Stack) -> None:
    """A new version of the workers leaves the container that owns the namespaces as it is."""
    [owner] = stack.containers("namespaces")
    stack.up("--force-recreate", "prefill-gpu", "decode-gpu")
    assert stack.containers("namespaces") == [owner]
    assert namespaces_of(stack, "prefill-gpu") == namespaces_of(stack, "namespaces")
    assert answer(stack)


def test_workers_drain_before_the_namespaces_end(stack: Stack) -> None:
    stack.compose("stop", timeout_seconds=120)
    codes = {
        container["Config"]["Labels"]["com.docker.compose.service"]: container["State"]["ExitCode"]
        for container in stack.inspect()
    }
    assert (codes["prefill-gpu"], codes["decode-gpu"]) == (0, 0)
