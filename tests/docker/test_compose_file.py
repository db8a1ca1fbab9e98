"""docker/ without an engine: the services of compose.yaml, and the rules for images."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROFILES = {"cpu": {"prefill", "decode"}, "gpu": {"prefill-gpu", "decode-gpu"}}
SHARED = {"router", "secret"}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
KERNELS = "/run/kvbaton/kernels"
CACHES = ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def environment(name: str) -> dict[str, Any]:
    """Return the environment of a service, with resolved anchors."""
    found: dict[str, Any] = SERVICES[name]["environment"]
    return found


def one_shots() -> set[str]:
    """Services that others wait for until they have ended."""
    return {
        dependency
        for service in SERVICES.values()
        for dependency, wait in service.get("depends_on", {}).items()
        if wait["condition"] == "service_completed_successfully"
    }


def test_each_profile_adds_one_prefill_and_one_decode_worker() -> None:
    assert SERVICES.keys() == SHARED.union(*PROFILES.values())
    for profile, names in PROFILES.items():
        assert {name for name, service in SERVICES.items() if service.get("profiles") == [profile]} == names
    assert all("profiles" not in SERVICES[name] for name in SHARED)
    assert "COMPOSE_PROFILES=gpu" in (ROOT / "docker" / ".env").read_text().splitlines()


def test_the_profiles_differ_in_the_device_only() -> None:
    for role in ("prefill", "decode"):
        cpu, gpu = SERVICES[role], SERVICES[f"{role}-gpu"]
        differing = {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}
        assert differing - {"build"} == {"profiles", "image", "environment", "deploy", "volumes"}
        assert [each for each in gpu["volumes"] if each not in cpu["volumes"]] == [f"kernels:{KERNELS}"]
        assert set(cpu["volumes"]) < set(gpu["volumes"])
        own = {"KVBATON_DEVICE", "KVBATON_WORKERS_ON_HOST", *CACHES}
        assert {k: v for k, v in environment(f"{role}-gpu").items() if k not in own} == {
            k: v for k, v in environment(role).items() if k not in own
        }
        [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
        assert "count" not in device
    devices = [
        SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in PROFILES["gpu"]
    ]
    assert devices[0] != devices[1]


def test_kernels_can_be_compiled_and_loaded_in_a_gpu_worker() -> None:
    """Triton needs a C compiler, and a folder that is writable and not mounted noexec, as a tmpfs is."""
    for name in PROFILES["gpu"]:
        for variable in CACHES:
            assert f"{environment(name)[variable]}/".startswith(f"{KERNELS}/")
        assert not any(each.startswith("/run") for each in SERVICES[name]["tmpfs"])
    assert "kernels" in COMPOSE["volumes"]
    assert re.search(r"install -d -m 0700 -o kvbaton [^\n]*" + KERNELS, DOCKERFILE)
    worker = DOCKERFILE[DOCKERFILE.index("FROM service AS worker") :]
    condition = 'RUN if [ "$TORCH_BUILD" = cuda ]; then'
    assert worker.index("ARG TORCH_BUILD") < worker.index(condition) < worker.index("USER 10001")
    assert "gcc libc6-dev" in worker[worker.index(condition) : worker.index("    fi")]


def test_only_the_routers_public_ports_are_published_and_only_to_this_machine() -> None:
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["router"]
    ports = SERVICES["router"]["ports"]
    assert [port.rpartition(":")[2] for port in ports] == ["8000", "9000"]
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_can_be_scaled_checked_and_stopped(name: str) -> None:
    service = SERVICES[name]
    assert "container_name" not in service
    assert "hostname" not in service
    assert "stop_grace_period" in service
    if name in one_shots():
        assert service["healthcheck"] == {"disable": True}
        return
    assert service["healthcheck"]["test"] == ["CMD", "is-healthy", "9101"]
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True


def test_the_secret_is_mounted_read_only_wherever_it_is_not_made() -> None:
    mounts = {name: [v for v in SERVICES[name]["volumes"] if v.startswith("secret:")] for name in SERVICES}
    assert mounts.pop("secret") == ["secret:/run/kvbaton/secret"]
    assert set(map(tuple, mounts.values())) == {("secret:/run/kvbaton/secret:ro",)}
    assert not [name for name in SERVICES if "KVBATON_SECRET" in SERVICES[name].get("environment", {})]


def test_another_model_folder_makes_other_containers_of_all() -> None:
    """The router's too, else it would refuse the new workers, or serve them under the old name."""
    assert environment("router")["MODEL_FOLDER"] == "${MODEL_FOLDER:-}"
    mount = "${MODEL_FOLDER:-../kvbaton/demo_model}:${MODEL_FOLDER:-/model}:ro"
    for name in set().union(*PROFILES.values()):
        assert environment(name)["KVBATON_MODEL"] == "${MODEL_FOLDER:-demo}"
        assert mount in SERVICES[name]["volumes"]


def test_every_image_is_built_once_from_a_target_of_the_one_dockerfile() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    builders = [service for service in SERVICES.values() if "build" in service]
    images = [service["image"] for service in builders]
    assert len(set(images)) == len(images)
    assert {(service["image"], service["pull_policy"]) for service in SERVICES.values()} == {
        (image, "never") for image in images
    }
    for build in (service["build"] for service in builders):
        assert (ROOT / "docker" / build["context"]).resolve() == ROOT
        assert build["dockerfile"] == "docker/Dockerfile"
        assert build["target"] in targets
        if torch := build.get("args", {}).get("TORCH_BUILD"):
            assert "torch==" in (ROOT / "constraints" / f"{torch}.txt").read_text()


def test_the_dockerfile_needs_no_image_but_its_base() -> None:
    assert "# syntax=" not in DOCKERFILE
    stages = set(re.findall(r" AS (\S+)$", DOCKERFILE, re.MULTILINE)) | {"${PYTHON_IMAGE}"}
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) <= stages
    assert DOCKERFILE.count("USER 10001") == 2
    assert DOCKERFILE.count('CMD ["is-healthy", "9101"]') == 2
    assert not list((ROOT / "docker").glob("*.py"))


def test_the_build_context_holds_every_package_of_the_wheel() -> None:
    """A package that .dockerignore forgets would be missing in the images only."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tools", "examples", "benchmarks", "tests"} <= kept
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints"} <= kept
