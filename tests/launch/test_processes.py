"""The processes that ``up`` starts, and their flags."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from contract.identity import Role
from launch.arguments import parse, to_arguments
from launch.client_settings import RunSettings
from launch.kept_process import ProcessSpec
from launch.machine_settings import ServeSettings, UpSettings
from launch.processes import local_processes
from launch.service_settings import PrefillCommand
from launch.settings import LocalSettings
from worker.options import WorkerOptions

ROUTER_FACTS = {
    "internal": "127.0.0.1:7",
    "http": "127.0.0.1:8",
    "grpc": "127.0.0.1:9",
    "admin": "127.0.0.1:10",
}


def specs(settings: LocalSettings) -> list[ProcessSpec]:
    return local_processes(settings, Path("/models/one"), Path("/private/secret"))


def flags(command: list[str]) -> dict[str, str]:
    """The flags of an argv after ``python -P -m cli.main ROLE``."""
    words = command[5:]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (UpSettings(), ["router", "prefill-0", "decode-0"]),
        (UpSettings(both=1), ["router", "both-0"]),
        (UpSettings(prefill=2, decode=1), ["router", "prefill-0", "prefill-1", "decode-0"]),
        (UpSettings(prefill=1, decode=1, both=1), ["router", "prefill-0", "decode-0", "both-0"]),
        (ServeSettings(), ["router", "both-0"]),
    ],
)
def test_pools(settings: LocalSettings, names: list[str]) -> None:
    found = specs(settings)
    assert [spec.name for spec in found] == names
    assert [spec.needs for spec in found] == [()] + [("router",)] * (len(names) - 1)
    assert [spec.role for spec in found] == [Role(name.partition("-")[0]) for name in names]


def test_serve_is_up_with_one_aggregated_worker() -> None:
    """A1: ``serve <model>``."""
    served = parse(ServeSettings, "kvbaton serve", ["org/name"])
    upped = parse(UpSettings, "kvbaton up", ["--both", "1", "--model", "org/name"])
    assert served.model_dump() == upped.model_dump(include=set(ServeSettings.model_fields))
    assert not upped.autoscale


def test_files_dir_is_passed_to_the_router_only_and_never_for_one_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVBATON_FILES_DIR", "/data/files")
    for settings, folder in ((UpSettings(), "/data/files"), (UpSettings(files_dir=Path("/other")), "/other")):
        router, *workers = specs(settings)
        assert flags(router.command({}))["--files-dir"] == folder
        assert "KVBATON_FILES_DIR" not in (router.env or {})
        assert all("--files-dir" not in worker.command({"router": ROUTER_FACTS}) for worker in workers)
    router = specs(RunSettings(prompt="Who are you?"))[0]
    assert "--files-dir" not in router.command({})
    assert "KVBATON_FILES_DIR" not in (router.env or {})


def test_workers_get_the_routers_address_and_the_settings_that_were_given() -> None:
    prefill = specs(UpSettings(max_num_seqs=3, num_threads=2, dtype="float32"))[1]
    given = flags(prefill.command({"router": ROUTER_FACTS}))
    assert given["--router"] == "127.0.0.1:7"
    assert given["--worker-id"] == "prefill-0"
    assert (given["--max-num-seqs"], given["--num-threads"], given["--dtype"]) == ("3", "2", "float32")
    assert given["--workers-on-host"] == "2"
    assert "--kv-cache-bytes" not in given


def test_each_worker_has_cores_of_its_own_on_request() -> None:
    def cores(**settings: Any) -> list[str | None]:
        every = local_processes(UpSettings(**settings), Path("m"), Path("s"), cores=[2, 3, 5, 7, 8])
        return [flags(one.command({"router": ROUTER_FACTS})).get("--cores") for one in every]

    assert cores() == [None] * 3
    assert cores(pin_cores=True) == [None, "2,3", "5,7"]
    assert cores(pin_cores=True, prefill=1, decode=2, num_threads=1) == [None, "2", "3", "5"]
    with pytest.raises(SettingError, match="2 workers of 3 threads need 6 cores, but only 5 are available"):
        cores(pin_cores=True, num_threads=3)


def test_prefill_workers_get_a_lower_priority_than_decode_workers() -> None:
    def nice(**settings: Any) -> list[str | None]:
        every = specs(UpSettings(**settings))
        return [flags(one.command({"router": ROUTER_FACTS})).get("--nice") for one in every]

    assert nice(device="cpu") == [None, "5", None]
    assert nice(device="cpu", prefill=1, decode=1, both=1, prefill_nice=7) == [None, "7", None, None]
    assert nice(device="cpu", both=1) == [None] * 2
    assert nice(device="cuda") == [None] * 3


def test_workers_that_change_their_roles_have_one_priority_unless_it_is_set() -> None:
    """A process cannot give its niceness back: a prefill worker that now decodes would remain slower than the others."""

    def nice(**settings: Any) -> str | None:
        every = specs(UpSettings(device="cpu", autoscale=True, prefill=1, decode=1, **settings))
        return flags(every[1].command({"router": ROUTER_FACTS})).get("--nice")

    assert nice() == "0"
    assert nice(prefill_nice=7) == "7"


def test_a_restarted_router_takes_its_earlier_ports() -> None:
    router = specs(UpSettings(http="127.0.0.1:0"))[0]
    assert flags(router.command({}))["--http"] == "127.0.0.1:0"
    again = flags(router.command({"router": ROUTER_FACTS}))
    assert [again[f"--{name}"] for name in ("http", "grpc", "internal", "admin")] == [
        "127.0.0.1:8",
        "127.0.0.1:9",
        "127.0.0.1:7",
        "127.0.0.1:10",
    ]


def test_a_worker_understands_the_flags_that_up_gives(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = UpSettings(
        model=str(tmp_path),
        kv_cache_bytes=2**20,
        max_model_len=64,
        max_num_batched_tokens=32,
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        attention_backend="triton",
        enforce_eager=True,
    )
    prefill = local_processes(settings, tmp_path, tmp_path / "secret")[1]
    command = prefill.command({"router": ROUTER_FACTS})
    worker = parse(PrefillCommand, "kvbaton prefill", command[5:])
    assert worker.model == tmp_path
    assert worker.served_model_name == tmp_path.name
    assert (worker.kv_cache_bytes, worker.max_model_len, worker.max_num_batched_tokens) == (2**20, 64, 32)
    assert worker.tensor_parallel_size == 2
    assert (worker.gpu_memory_utilization, worker.attention_backend, worker.enforce_eager) == (
        0.5,
        "triton",
        True,
    )


def test_flags_of_values() -> None:
    values = {"one_two": 3, "left_out": None, "yes": True, "no": False}
    assert to_arguments(values) == ["--one-two", "3", "--yes", "--no-no"]


def test_a_router_gets_the_worker_options_that_it_shares() -> None:
    """A flag of ``up`` must apply to the workers and to the router."""
    router, prefill, _ = specs(UpSettings(peer_timeout_seconds=5.0, lease_seconds=40.0))
    assert flags(router.command({}))["--peer-timeout-seconds"] == "5.0"
    assert "--lease-seconds" not in router.command({})
    given = flags(prefill.command({"router": ROUTER_FACTS}))
    assert (given["--peer-timeout-seconds"], given["--lease-seconds"]) == ("5.0", "40.0")


def test_options_that_were_not_set_are_left_to_the_worker() -> None:
    command = specs(UpSettings())[1].command({"router": ROUTER_FACTS})
    assert not {f"--{name.replace('_', '-')}" for name in WorkerOptions.names()} & set(command)
