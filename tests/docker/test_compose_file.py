"""docker/ without an engine: the services of compose.yaml, and the rules for images."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROFILES = {
    "cpu": {"prefill", "decode"},
    "gpu": {"prefill-gpu", "decode-gpu"},
}
NAMESPACES = "namespaces"
MONITORING = {"prometheus": "9090", "grafana": "3000"}
"""The services of others, and their ports."""
SHARED = {"router", "secret"}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
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


def test_each_profile_adds_its_workers() -> None:
    assert SERVICES.keys() == {*SHARED, *MONITORING, NAMESPACES}.union(*PROFILES.values())
    assert all(SERVICES[name]["profiles"] == ["monitoring"] for name in MONITORING)
    for profile, names in PROFILES.items():
        workers = {name for name, service in SERVICES.items() if profile in service.get("profiles", ())}
        assert workers - {NAMESPACES} == names
        assert (NAMESPACES in workers) == (profile == "gpu")
    assert all("profiles" not in SERVICES[name] for name in SHARED)
    assert "COMPOSE_PROFILES=gpu" in (ROOT / "docker" / ".env").read_text().splitlines()


def test_the_profiles_differ_in_the_device_only() -> None:
    differing = {"profiles", "image", "environment", "deploy", "volumes", "entrypoint", "depends_on"}
    for role in ("prefill", "decode"):
        cpu, gpu = SERVICES[role], SERVICES[f"{role}-gpu"]
        found = {key for key in cpu.keys() | gpu.keys() if cpu.get(key) != gpu.get(key)}
        assert found - {"build"} == {*differing, "pid", "ipc", "init"}
        assert len([each for each in gpu["volumes"] if each not in cpu["volumes"]]) == 1
        assert set(cpu["volumes"]) < set(gpu["volumes"])
        assert cpu["depends_on"].items() <= gpu["depends_on"].items()
        shell, option, line, name = cpu["entrypoint"]
        assert gpu["entrypoint"][::3] == [shell, name]
        assert gpu["entrypoint"][1] == option
        assert gpu["entrypoint"][2].startswith(f"{line} --device ")
        own = {"GPU_PLACE", "KVBATON_WORKERS_ON_HOST", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"}
        assert {k: v for k, v in environment(f"{role}-gpu").items() if k not in own} == {
            k: v for k, v in environment(role).items() if k not in own
        }


def test_only_public_ports_are_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    ends = {name: [port.rpartition(":")[2] for port in ports] for name, ports in published.items()}
    assert ends == {"router": ["8000", "9000"], **{name: [port] for name, port in MONITORING.items()}}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_can_be_scaled_checked_and_stopped(name: str) -> None:
    service = SERVICES[name]
    assert "container_name" not in service
    assert "hostname" not in service
    assert "stop_grace_period" in service
    if name in one_shots():
        assert service["healthcheck"] == {"disable": True}
        return
    if name in MONITORING:
        assert f":{MONITORING[name]}/" in service["healthcheck"]["test"][-1]
    else:
        check = ["CMD", "true"] if name == NAMESPACES else ["CMD", "is-healthy", "9101"]
        assert service["healthcheck"]["test"] == check
    assert service["init"] is ("pid" not in service)
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True


def test_the_secret_is_mounted_read_only_wherever_it_is_not_made() -> None:
    assert not SERVICES[NAMESPACES].get("volumes")
    names = SERVICES.keys() - {NAMESPACES, *MONITORING}
    mounts = {name: [v for v in SERVICES[name]["volumes"] if v.startswith("secret:")] for name in names}
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
    own = [service for name, service in SERVICES.items() if name not in MONITORING]
    assert {(service["image"], service["pull_policy"]) for service in own} == {
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
    assert DOCKERFILE.count("USER 10001") == 3
    assert DOCKERFILE.count('CMD ["is-healthy", "9101"]') == 2
    assert not list((ROOT / "docker").glob("*.py"))


def test_every_image_is_labelled() -> None:
    finals = [service["build"]["target"] for service in SERVICES.values() if "build" in service]
    for target in finals:
        stage = DOCKERFILE[DOCKERFILE.index(f" AS {target}\n") :].partition("\nFROM ")[0]
        assert f"LABEL org.opencontainers.image.title=kvbaton-{target}" in stage
    (version,) = re.findall(r"org\.opencontainers\.image\.version=(\S+)", DOCKERFILE)
    assert version == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_build_context_holds_every_package_of_the_wheel() -> None:
    """A package that .dockerignore forgets would be missing in the images only."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tools", "examples", "benchmarks", "tests"} <= kept
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints"} <= kept


def test_the_images_of_others_have_an_exact_version_and_read_our_files_only() -> None:
    for name in MONITORING:
        service = SERVICES[name]
        assert re.fullmatch(rf"\$\{{{name.upper()}_IMAGE:-[\w/]+:v?\d+\.\d+\.\d+\}}", service["image"])
        mounts = [volume.split(":") for volume in service["volumes"]]
        assert all(options == ["ro"] for source, _, *options in mounts if source.startswith("."))
        assert all((ROOT / "docker" / source).is_dir() for source, *_ in mounts if source.startswith("."))
        assert {source for source, *_ in mounts if not source.startswith(".")} == {name}
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]


def test_prometheus_finds_the_router_and_all_workers_by_name() -> None:
    config = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
    names = [name for job in config["scrape_configs"] for name in job["dns_sd_configs"][0]["names"]]
    assert names == ["router", "workers"]
    for name in set().union(*PROFILES.values()):
        assert SERVICES[name]["networks"] == {"default": {"aliases": ["workers"]}}


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    folder = ROOT / "docker" / "grafana" / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert [source["url"] for source in sources] == ["http://prometheus:9090"]
    providers = yaml.safe_load((folder / "dashboards" / "kvbaton.yml").read_text())["providers"]
    targets = {volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]}
    assert {provider["options"]["path"] for provider in providers} <= targets
    assert "/etc/grafana/provisioning" in targets


def test_every_service_has_limits_of_memory_and_processes() -> None:
    for name, service in SERVICES.items():
        assert service["pids_limit"] <= 4096, name
        is_worker = name in set().union(*PROFILES.values())
        assert re.fullmatch(
            r"\$\{WORKER_MEMORY:-0\}" if is_worker else r"(\$\{\w+_MEMORY:-)?\d+[mg]\}?", service["mem_limit"]
        )
