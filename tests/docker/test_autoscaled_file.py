"""`kvbaton compose --autoscale`: a service that starts and removes workers, and what it finds them and copies them by."""

import re
from pathlib import Path

import pytest

from autoscaler.launchers.docker.launcher import PLACES_LABEL, ROLE_LABEL
from autoscaler.timing_model import write_timing
from contract.errors import SettingError
from launch.arguments import parse
from launch.service_settings import AutoscalerCommand
from tests.autoscaler.cases import TIMING
from tests.docker.composed import SHIPPED, Services, by_compose, by_hand, written

SOCKET = "/var/run/docker.sock"
ADMIN = "/run/kvbaton/admin"
DOCKERFILE = (SHIPPED.parent / "Dockerfile").read_text()
RANGES = ("--prefill", "1:2", "--decode", "2:6")
GPUS = ("--prefill-devices", "0,1", "--decode-devices", "2-7")


@pytest.fixture
def timing(tmp_path: Path) -> Path:
    path = tmp_path / "timing.json"
    write_timing(path, TIMING)
    return path


def scaled(folder: Path, *flags: str) -> Path:
    """Return a file with an autoscaler."""
    return written(folder, "--autoscale", "--timing", str(folder / "timing.json"), *flags)


def command_of(services: Services) -> AutoscalerCommand:
    """Return the settings of the autoscaler in a file, as its process reads them."""
    name, *flags = services["autoscaler"]["command"]
    assert name == "autoscaler"
    return parse(AutoscalerCommand, f"kvbaton {name}", flags)


def check_policy(services: Services, profile: str) -> None:
    """Assert all that the autoscaler needs of the containers, and that nothing else can use the engine."""
    scaler = services["autoscaler"]
    mounts = {name: [v["target"] for v in service.get("volumes", ())] for name, service in services.items()}
    assert [name for name, targets in mounts.items() if SOCKET in targets] == ["autoscaler"]
    assert sorted(mounts["autoscaler"]) == ["/etc/kvbaton/timing.json", ADMIN, SOCKET]
    assert {name for name, targets in mounts.items() if ADMIN in targets} == {
        "secret",
        "router",
        "autoscaler",
    }
    for name in ("router", "autoscaler"):
        [mount] = [v for v in services[name]["volumes"] if v["target"] == ADMIN]
        assert mount["read_only"] is True
        assert services[name]["environment"]["KVBATON_ADMIN_KEYS_FILE"] == f"{ADMIN}/keys"
        assert services[name]["depends_on"]["secret"]["condition"] == "service_completed_successfully"
    assert services["secret"]["command"][0].count("../admin/keys") == 2
    assert "ports" not in scaler
    assert "user" not in scaler, "that of the image: not root"
    assert scaler["cap_drop"] == ["ALL"]
    assert scaler["read_only"] is True
    assert scaler["security_opt"] == ["no-new-privileges:true"]
    assert scaler["image"] == services["router"]["image"], "without torch"
    workers = {name for name, service in services.items() if ROLE_LABEL in service.get("labels", {})}
    suffix = "-gpu" if profile == "gpu" else ""
    assert workers == {f"prefill{suffix}", f"decode{suffix}"}
    for name in workers:
        service = services[name]
        assert service["command"] == [service["labels"][ROLE_LABEL]]
        assert (PLACES_LABEL in service["labels"]) is (profile == "gpu")
    for name in ("router", *workers):
        wait = scaler["depends_on"][name]
        assert wait["condition"] == "service_started", "it is stopped before them"
        assert wait.get("required", True) is (name == "router"), "the other profile has other workers"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_service_of_its_own_has_the_socket(profile: str, timing: Path, tmp_path: Path) -> None:
    check_policy(by_hand(profile, {}, scaled(tmp_path, *RANGES)), profile)
    assert SOCKET not in SHIPPED.read_text()
    assert ROLE_LABEL not in SHIPPED.read_text()
    assert ADMIN not in SHIPPED.read_text()
    assert re.search(rf"install -d -m 0700 -o kvbaton [^\n]*{ADMIN} ", DOCKERFILE), (
        "so its volume is the user's"
    )


@pytest.mark.docker
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_compose_reads_the_file_in_the_same_way(profile: str, timing: Path, tmp_path: Path) -> None:
    path = scaled(tmp_path, *RANGES)
    services = by_compose(profile, {}, path)
    check_policy(services, profile)
    assert services.keys() == by_hand(profile, {}, path).keys()
    assert command_of(services).project == "kvbaton"


def test_its_command_has_the_bounds_and_the_goals_of_the_flags(timing: Path, tmp_path: Path) -> None:
    pace = ("--scaling-interval-seconds", "2", "--shrink-after-seconds", "60")
    flags = (*RANGES, "--budget", "7", *pace, "--ttft-goal-ms", "500", "--tensor-parallel-size", "2")
    services = by_hand("cpu", {}, scaled(tmp_path, *flags))
    settings = command_of(services)
    assert (settings.prefill, settings.max_prefill) == (1, 2)
    assert (settings.decode, settings.max_decode) == (2, 6)
    assert settings.budget == 7
    assert (settings.scaling_interval_seconds, settings.shrink_after_seconds) == (2.0, 60.0)
    assert (settings.project, settings.router_admin) == ("kvbaton", "router:9101")
    own = services["autoscaler"]["environment"]
    for name in ("KVBATON_TTFT_GOAL_MS", "KVBATON_ITL_GOAL_MS"):
        assert own[name] == services["router"]["environment"][name]
    assert own["KVBATON_TTFT_GOAL_MS"] == 500
    assert (
        own["KVBATON_TENSOR_PARALLEL_SIZE"]
        == services["prefill"]["environment"]["KVBATON_TENSOR_PARALLEL_SIZE"]
    )
    mounted = {v["target"]: v for v in services["autoscaler"]["volumes"]}
    assert mounted[str(settings.timing)] == {
        "type": "bind",
        "source": str(timing),
        "target": "/etc/kvbaton/timing.json",
        "read_only": True,
    }


def test_a_group_is_one_container_of_its_role(timing: Path, tmp_path: Path) -> None:
    services = by_hand("cpu", {}, scaled(tmp_path, *RANGES, "--data-parallel-size", "2", "--budget", "6"))
    for name in ("autoscaler", "prefill", "decode"):
        assert services[name]["environment"]["KVBATON_DATA_PARALLEL_SIZE"] == 2
    assert services["decode"]["deploy"]["replicas"] == 2
    with pytest.raises(SettingError, match="budget is 5, but the smallest pools need 6 devices"):
        scaled(tmp_path, *RANGES, "--data-parallel-size", "2", "--budget", "5")


def test_the_least_workers_are_started_by_compose_and_memory_is_divided_for_the_most(
    timing: Path, tmp_path: Path
) -> None:
    services = by_hand("cpu", {}, scaled(tmp_path, *RANGES))
    assert "deploy" not in services["prefill"]
    assert services["decode"]["deploy"] == {"replicas": 2}
    assert services["decode"]["environment"]["KVBATON_WORKERS_ON_HOST"] == 8


@pytest.mark.parametrize("flags", [GPUS, RANGES])
def test_a_role_has_one_service_on_gpus_with_the_places_of_its_largest_pool(
    flags: tuple[str, ...], timing: Path, tmp_path: Path
) -> None:
    """The autoscaler copies that service's container, and gives each copy a free place."""
    services = by_hand("gpu", {}, scaled(tmp_path, *flags))
    gpu = {name: service for name, service in services.items() if "-gpu" in name}
    assert gpu.keys() == {"prefill-gpu", "decode-gpu"}
    places = {name: service["labels"][PLACES_LABEL] for name, service in gpu.items()}
    assert places == {"prefill-gpu": "0,1", "decode-gpu": "2,3,4,5,6,7"}
    first = {name: str(service["environment"]["GPU_PLACE"]) for name, service in gpu.items()}
    assert first == {"prefill-gpu": "0", "decode-gpu": "2"}
    settings = command_of(services)
    assert (settings.max_prefill, settings.max_decode) == (2, 6)


def test_the_groups_of_the_socket_can_be_given(timing: Path, tmp_path: Path) -> None:
    services = by_hand("cpu", {"DOCKER_GID": "998", "DOCKER_SOCKET": "/run/rootless.sock"}, scaled(tmp_path))
    assert services["autoscaler"]["group_add"] == ["998"]
    assert "/run/rootless.sock" in [v["source"] for v in services["autoscaler"]["volumes"]]


@pytest.mark.parametrize(
    ("flags", "profile"),
    [(("--prefill", "0:2", "--decode", "0:6"), "cpu"), ((*GPUS, "--prefill", "0", "--decode", "0"), "gpu")],
)
def test_a_pool_that_may_be_empty_begins_with_a_container_to_copy_and_requests_wait_for_it(
    flags: tuple[str, ...], profile: str, timing: Path, tmp_path: Path
) -> None:
    services = by_hand(profile, {}, scaled(tmp_path, *flags))
    settings = command_of(services)
    assert (settings.prefill, settings.max_prefill) == (0, 2)
    assert (settings.decode, settings.max_decode) == (0, 6)
    assert not [name for name, service in services.items() if "replicas" in service.get("deploy", {})]
    assert services["router"]["environment"]["KVBATON_WORKER_WAIT_SECONDS"] == 540.0
    never = by_hand("cpu", {}, scaled(tmp_path, *RANGES))
    assert "KVBATON_WORKER_WAIT_SECONDS" not in never["router"]["environment"]


@pytest.mark.parametrize(("flags", "has_gpu"), [(RANGES, False), (GPUS, True)])
def test_without_a_timing_file_the_autoscaler_guesses_by_the_size_of_the_model(
    flags: tuple[str, ...], has_gpu: bool, tmp_path: Path
) -> None:
    services = by_hand("gpu" if has_gpu else "cpu", {}, written(tmp_path, "--autoscale", *flags))
    settings = command_of(services)
    assert settings.timing is None
    assert (
        settings.weight_bytes == (SHIPPED.parents[1] / "kvbaton/demo_model/model.safetensors").stat().st_size
    )
    assert settings.has_gpu is has_gpu
    targets = [v["target"] for v in services["autoscaler"]["volumes"]]
    assert "/etc/kvbaton/timing.json" not in targets


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--timing", "timing.json"), "timing has no effect without autoscale"),
        (("--prefill", "1:2"), "prefill is 1:2, and a range has no effect without"),
        (("--autoscale", "--timing", "missing.json"), "timing file missing.json cannot be read"),
        (("--autoscale", "--timing", "TIMING", "--prefill", "3:2"), "prefill is '3:2': a range is"),
        (("--autoscale", "--timing", "TIMING", "--prefill", "0"), "prefill is 0"),
        (("--autoscale", "--timing", "BROKEN"), "timing file .*broken.json cannot be used"),
        (("--autoscale", "--prefill", "1:3", "--max-prefill", "2"), "prefill is 1:3, and max_prefill is 2"),
        (("--autoscale", "--prefill", "2:3", "--decode", "2:3", "--budget", "3"), "budget is 3"),
        (
            ("--autoscale", "--timing", "TIMING", *GPUS, "--decode", "1:5"),
            "decode is 1:5, and decode_devices",
        ),
        (("--autoscale", "--timing", "TIMING", *GPUS, "--decode", "7"), "decode is 7, and decode_devices"),
    ],
)
def test_contradictions_are_refused(
    flags: tuple[str, ...], message: str, timing: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    files = {"TIMING": str(timing), "BROKEN": str(broken)}
    given = [files.get(flag, flag) for flag in flags]
    with pytest.raises(SettingError, match=message):
        written(tmp_path, *given)
    assert not (tmp_path / "compose.yaml").exists()


def test_the_header_has_the_flags_that_write_it_again(timing: Path, tmp_path: Path) -> None:
    path = scaled(tmp_path, *RANGES)
    text = path.read_text()
    head = text.splitlines()[0].removeprefix("# Written by `kvbaton compose ").partition("`")[0]
    assert "--autoscale" in head
    assert written(tmp_path, *head.split()).read_text() == text
