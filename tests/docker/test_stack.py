"""The compose stack on a real engine, from `build` to `down -v`: `make test-docker`."""

import json
import urllib.request
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest

from autoscaler.timing_model import read_timing
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.docker.stack import UP_SECONDS, Stack, admin_page, docker, living, running_stack, watched
from tests.service import counter

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

ANSWER_SECONDS = 120
LONG = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
"""Nine tokens in ten are still to come when the tests kill the worker that makes them."""
PROMPT_IDS = list(range(3, 103))
_SCRAPE = """
import socket, urllib.request
for name in ("router", "workers"):
    for *_, (address, _) in socket.getaddrinfo(name, 9101, socket.AF_INET, socket.SOCK_STREAM):
        print(urllib.request.urlopen(f"http://{address}:9101/metrics", timeout=10).read().decode())
"""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack() as running:
        yield running


def post(stack: Stack, path: str, body: dict[str, Any]) -> Any:
    """One POST of JSON; the open response. Raises urllib.error.HTTPError for a status that is no success."""
    return urllib.request.urlopen(
        urllib.request.Request(
            f"http://{stack.published(8000)}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        ),
        timeout=ANSWER_SECONDS,
    )


def events(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream, as it arrives."""
    for line in lines:
        if line.startswith(b"data: "):
            yield line.decode().removeprefix("data: ").strip()


def text_of(event: str) -> str:
    """The text of one completion chunk. Raises AssertionError for an error event."""
    chunk = json.loads(event)
    assert "error" not in chunk, chunk
    return "".join(choice["text"] for choice in chunk["choices"])


def generate(stack: Stack, request: pb.GenerateRequest) -> list[int]:
    """The token ids of one Generate over gRPC."""
    with grpc.insecure_channel(stack.published(9000)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        messages = stub.Generate(request, timeout=ANSWER_SECONDS)
        return [token for message in messages for choice in message.choices for token in choice.token_ids]


def test_the_router_image_holds_no_torch_and_runs_as_nobody_special(stack: Stack) -> None:
    look = "import importlib.util as u, os; print(u.find_spec('torch'), u.find_spec('numpy'), os.getuid())"
    assert docker("exec", *stack.containers("router"), "python", "-c", look).split() == [
        "None",
        "None",
        "10001",
    ]
    assert docker("exec", *stack.containers("decode"), "id", "-u").strip() == "10001"


def test_every_image_says_what_it_is(stack: Stack) -> None:
    for container in stack.inspect("router", "prefill", "decode"):
        labels = container["Config"]["Labels"]
        assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
        assert labels["org.opencontainers.image.title"].startswith("kvbaton")
        assert labels["org.opencontainers.image.version"] == version("kvbaton")


def test_the_workers_image_has_the_compiled_code(stack: Stack) -> None:
    look = (
        "from engine.kernels.binding import LIBRARY; from kv_transfer.native.compiling import BLOCKS\n"
        "print([each.prebuilt.is_file() for each in (BLOCKS, LIBRARY)])"
    )
    assert docker("exec", *stack.containers("decode"), "python", "-c", look).strip() == "[True, True]"


@pytest.mark.parametrize(("service", "most_mib"), [("router", 200), ("decode", 1200)])
def test_what_an_image_adds_to_its_base_is_small(service: str, most_mib: int, stack: Stack) -> None:
    size, _ = docker("exec", *stack.containers(service), "du", "-sm", "/opt/kvbaton").split()
    assert int(size) < most_mib


def test_the_secret_is_for_the_services_user_alone(stack: Stack) -> None:
    for service in ("router", "prefill", "decode"):
        told = docker(
            "exec", *stack.containers(service), "stat", "-c", "%a %u %s", "/run/kvbaton/secret/cluster"
        )
        assert told.split() == ["600", "10001", "65"]


def test_only_the_two_public_ports_are_published_and_only_here(stack: Stack) -> None:
    published = {
        (port, bound["HostIp"])
        for container in stack.inspect()
        for port, bindings in container["NetworkSettings"]["Ports"].items()
        for bound in bindings or ()
    }
    assert published == {("8000/tcp", "127.0.0.1"), ("9000/tcp", "127.0.0.1")}


def test_a_chat_is_answered_as_soon_as_up_returns(stack: Stack) -> None:
    messages = [{"role": "user", "content": 'lamp: fox\ncomet: ginger\nacorn: lantern\nWhat is "comet"?'}]
    with post(stack, "/v1/chat/completions", {"messages": messages, "temperature": 0}) as response:
        body = json.load(response)
    assert body["model"] == "kvbaton-demo"
    assert body["choices"][0]["message"]["content"] == "comet: ginger"


def test_kv_moves_between_the_containers_by_shared_memory(stack: Stack) -> None:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert (
        len(generate(stack, pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT_IDS), sampling=sampling)))
        == 4
    )
    pages = [admin_page(container, "/metrics") for container in stack.containers("decode")]
    assert counter(pages, "kvbaton_transfer_blocks_total", transport="shm") >= len(PROMPT_IDS) // 16


def test_a_timing_file_is_measured_in_a_container(stack: Stack, tmp_path: Path) -> None:
    """An autoscaler's file needs nothing that is installed on the machine: see docs/docker.md."""
    measured = "env -u KVBATON_ADMIN kvbaton bench --profile --model demo --output /tmp/timing.json"
    command = f"{measured} --longest-prompt 256 --max-num-seqs 8 --kv-cache-bytes {2**26} >&2 && cat /tmp/timing.json"
    run = ("run", "--rm", "--network", "none", "--entrypoint", "sh", "kvbaton-worker:cpu", "-c", command)
    path = tmp_path / "timing.json"
    path.write_text(docker(*run, timeout_seconds=UP_SECONDS))
    timing = read_timing(path)
    assert timing.prefill.seconds(256) > timing.prefill.seconds(16) > 0
    assert timing.max_answers == 8


def test_a_stream_outlives_the_container_that_makes_it(stack: Stack) -> None:
    """Two decode workers, one killed in mid-stream: the client reads the text that it would have read anyway."""
    with post(stack, "/v1/completions", LONG) as response:
        undisturbed = json.load(response)["choices"][0]["text"]
    stack.up("--no-recreate", "--scale", "decode=2")
    decodes = stack.containers("decode")
    assert len(decodes) == 2
    with watched(decodes) as wait, post(stack, "/v1/completions", {**LONG, "stream": True}) as response:
        stream = events(response)
        pieces = [text_of(next(stream)) for _ in range(20)]
        busy = wait()
        docker("kill", *busy)
        rest = list(stream)
    assert len(busy) == 1
    assert rest[-1] == "[DONE]", rest[-1]
    assert "".join([*pieces, *map(text_of, rest[:-1])]) == undisturbed
    [router] = stack.containers("router")
    assert counter([admin_page(router, "/metrics")], "kvbaton_request_replays_total") >= 1


def test_the_names_in_prometheus_configuration_are_those_of_every_process(stack: Stack) -> None:
    """The metrics are read by address, as Prometheus does."""
    stack.up()
    (router,) = stack.containers("router")
    text = docker("exec", router, "python", "-c", _SCRAPE)
    assert text.count("# TYPE kvbaton_workers gauge") == 1
    assert text.count("# TYPE kvbaton_worker_info gauge") == 2


def test_sigterm_ends_every_service_and_down_leaves_nothing(stack: Stack) -> None:
    stack.up()
    names = {container["Id"] for container in stack.inspect() if container["State"]["Running"]}
    assert len(names) == 3
    processes = stack.processes()
    assert len(living(processes)) >= len(names)
    stack.compose("stop")
    ended = [container["State"] for container in stack.inspect() if container["Id"] in names]
    assert [(state["Status"], state["ExitCode"]) for state in ended] == [("exited", 0)] * 3
    assert stack.leftovers().keys() == {"containers", "networks", "volumes"}
    stack.down()
    assert stack.leftovers() == {}
    assert living(processes) == set()
