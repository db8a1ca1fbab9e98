"""The profile gpu of Compose files for 2, 4 and 8 GPUs: what each worker sees, shares and computes on."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.docker.composed import Services, by_compose, by_hand, devices, started, written

ROOT = Path(__file__).parents[2]
KERNELS = "/run/kvbaton/kernels"
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
TWO_RANKS = {"KVBATON_TENSOR_PARALLEL_SIZE": "2"}
FOUR = ("--prefill-devices", "0", "--decode-devices", "1-3")
EIGHT = ("--prefill-devices", "0,4", "--decode-devices", "1-3,5-7")
RANKS = ("--prefill-devices", "0,1", "--decode-devices", "2-7", "--tensor-parallel-size", "2")
GROUPS = (*RANKS[:1], "0-3", RANKS[2], "4-7", *RANKS[4:], "--data-parallel-size", "2")
MACHINES = [
    pytest.param((), {}, 2, 1, id="2 GPUs"),
    pytest.param(FOUR, {}, 4, 1, id="4 GPUs"),
    pytest.param(EIGHT, {}, 8, 1, id="8 GPUs"),
    pytest.param((), TWO_RANKS, 4, 2, id="4 GPUs, tp 2"),
    pytest.param(FOUR, TWO_RANKS, 8, 2, id="8 GPUs, tp 2"),
    pytest.param(RANKS, {}, 8, 2, id="8 GPUs, tp 2 in the file"),
    pytest.param(GROUPS, {}, 8, 4, id="8 GPUs, dp 2 of tp 2"),
]
"""The flags of `kvbaton compose`, variables, the number of GPUs, and those of each worker."""


def workers(services: Services) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in services.items() if "-gpu" in name}


def check_policy(services: Services, num_gpus: int, ranks: int, folder: Path) -> None:
    """Assert all that KV from GPU to GPU and compiled kernels need of the containers."""
    found = workers(services)
    owner = services["namespaces"]
    assert owner["ipc"] == "shareable"
    assert owner["image"] != found["prefill-gpu"]["image"], "a new version of the workers would replace it"
    assert owner["init"] is True
    assert not devices(owner)
    taken = Counter[int]()
    roles = Counter[str]()
    for service in found.values():
        assert service["pid"] == service["ipc"] == "service:namespaces"
        assert service["depends_on"]["namespaces"]["condition"] == "service_started"
        [device] = devices(service)
        assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", -1, ["gpu"])
        check_caches(service)
        flags = started(service, folder)
        roles[flags["role"]] += 1
        assert flags["--worker-id"] == f"{flags['role']}-container"
        kind, _, first = flags["--device"].partition(":")
        assert kind == "cuda"
        taken.update(range(int(first), int(first) + ranks))
        assert int(service["environment"]["KVBATON_WORKERS_ON_HOST"]) == 1
    assert taken == Counter(range(num_gpus)), "each GPU has one worker"
    assert roles.keys() == {"prefill", "decode"}


def check_caches(service: dict[str, Any]) -> None:
    """Assert that compiled kernels lie on a volume: it is writable, and not mounted noexec as a tmpfs is."""
    for variable in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert f"{service['environment'][variable]}/".startswith(f"{KERNELS}/")
    [volume] = [each for each in service["volumes"] if each["target"] == KERNELS]
    assert (volume["type"], volume["source"]) == ("volume", "kernels"), (
        "shared, and kept when a container goes"
    )
    assert not volume.get("read_only")
    assert not any(each.startswith("/run") for each in service["tmpfs"])
    assert service["read_only"] is True


@pytest.mark.parametrize(("flags", "variables", "num_gpus", "ranks"), MACHINES)
def test_every_gpu_has_one_worker_that_sees_all(
    flags: tuple[str, ...], variables: dict[str, str], num_gpus: int, ranks: int, tmp_path: Path
) -> None:
    check_policy(by_hand("gpu", variables, written(tmp_path, *flags)), num_gpus, ranks, tmp_path)


@pytest.mark.docker
@pytest.mark.parametrize(("flags", "variables", "num_gpus", "ranks"), MACHINES)
def test_compose_reads_the_file_in_the_same_way(
    flags: tuple[str, ...], variables: dict[str, str], num_gpus: int, ranks: int, tmp_path: Path
) -> None:
    path = written(tmp_path, *flags)
    services = by_compose("gpu", variables, path)
    check_policy(services, num_gpus, ranks, tmp_path)
    assert services.keys() == by_hand("gpu", variables, path).keys()


def test_two_workers_share_a_gpu_where_their_places_are_equal(tmp_path: Path) -> None:
    variables = {"PREFILL_GPU": "3", "DECODE_GPU": "3", "KVBATON_WORKERS_ON_HOST": "2"}
    for service in workers(by_hand("gpu", variables)).values():
        assert started(service, tmp_path)["--device"] == "cuda:3"
        assert int(service["environment"]["KVBATON_WORKERS_ON_HOST"]) == 2


def test_the_namespaces_may_be_those_of_the_host() -> None:
    for service in workers(by_hand("gpu", {"GPU_NAMESPACES": "host"})).values():
        assert service["pid"] == service["ipc"] == "host"


def test_the_gpu_image_has_a_compiler_and_nixl() -> None:
    """Triton needs a C compiler when a worker starts; without NIXL, KV would go through the host."""
    assert re.search(r"install -d -m 0700 -o kvbaton [^\n]*" + KERNELS, DOCKERFILE)
    worker = DOCKERFILE[DOCKERFILE.index("FROM service AS worker") :]
    condition = 'RUN if [ "$TORCH_BUILD" = cuda ]; then'
    assert worker.index("ARG TORCH_BUILD") < worker.index(condition) < worker.index("USER 10001")
    assert "gcc libc6-dev" in worker[worker.index(condition) : worker.index("    fi")]
    libraries = DOCKERFILE[DOCKERFILE.index(" AS worker-libraries") : DOCKERFILE.index(" AS wheel")]
    assert "-r constraints/nixl.lock" in libraries[libraries.index(condition) : libraries.index("    fi\n\n")]
