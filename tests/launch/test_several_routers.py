"""``kvbaton up --routers N``: the routers' ports, and what the workers and the ready file get."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from launch.kept_process import Facts, ProcessSpec
from launch.machine_settings import ServeSettings, UpSettings
from launch.processes import local_processes
from launch.settings import LocalSettings
from launch.supervisor import write_ready_file

ROUTERS = ["router", "router-1", "router-2"]


def specs(settings: LocalSettings) -> dict[str, ProcessSpec]:
    made = local_processes(settings, Path("/models/one"), Path("/private/secret"))
    return {spec.name: spec for spec in made}


def facts(number: int, **addresses: str) -> Facts:
    kinds = ("http", "grpc", "internal", "admin")
    return {kind: f"127.0.0.1:{number}{place}" for place, kind in enumerate(kinds)} | addresses


def flag(command: list[str], name: str) -> str | None:
    return command[command.index(name) + 1] if name in command else None


def test_every_worker_gets_the_addresses_of_all_routers_and_waits_for_them() -> None:
    found = specs(UpSettings(routers=3))
    assert list(found) == [*ROUTERS, "prefill-0", "decode-0"]
    known = {name: facts(number) for number, name in enumerate(ROUTERS, 1)}
    for worker in ("prefill-0", "decode-0"):
        assert set(found[worker].needs) == set(ROUTERS)
        assert flag(found[worker].command(known), "--router") == "127.0.0.1:12,127.0.0.1:22,127.0.0.1:32"


@pytest.mark.parametrize("port", [0, 8000])
def test_routers_share_the_ports_that_the_first_one_has(port: int) -> None:
    found = specs(UpSettings(routers=2, http=f"127.0.0.1:{port}", grpc="127.0.0.1:0"))
    assert found["router-1"].needs == ("router",)
    first = facts(1, http="127.0.0.1:8000")
    one = found["router"].command({})
    other = found["router-1"].command({"router": first})
    assert flag(one, "--http") == f"127.0.0.1:{port}"
    assert flag(other, "--http") == "127.0.0.1:8000"
    assert flag(other, "--grpc") == first["grpc"]
    assert "--reuse-port" in one
    assert "--reuse-port" in other
    assert flag(other, "--internal") == flag(other, "--admin") == "127.0.0.1:0"


@pytest.mark.parametrize(("port", "ports"), [(8000, [8000, 8001, 8002]), (0, [0, 0, 0])])
def test_routers_with_ports_of_their_own_count_up(port: int, ports: list[int]) -> None:
    found = specs(UpSettings(routers=3, shared_ports=False, http=f"127.0.0.1:{port}"))
    commands = [found[name].command({}) for name in ROUTERS]
    assert [flag(command, "--http") for command in commands] == [f"127.0.0.1:{port}" for port in ports]
    assert [flag(command, "--grpc") for command in commands] == [f"127.0.0.1:{9000 + n}" for n in range(3)]
    assert not any("--reuse-port" in command for command in commands)
    assert [found[name].needs for name in ROUTERS] == [(), (), ()]


def test_a_router_that_starts_again_keeps_its_ports() -> None:
    """Workers and clients have its addresses; the other routers keep theirs."""
    found = specs(UpSettings(routers=2))
    known = {name: facts(number) for number, name in enumerate(ROUTERS[:2], 1)}
    for name in ROUTERS[:2]:
        command = found[name].command(known)
        assert {kind: flag(command, f"--{kind}") for kind in ("http", "grpc", "internal", "admin")} == {
            kind: known[name][kind] for kind in ("http", "grpc", "internal", "admin")
        }


def test_one_router_shares_nothing() -> None:
    command = specs(ServeSettings())["router"].command({})
    assert "--reuse-port" not in command


def test_several_routers_have_no_common_folder_of_files() -> None:
    """A batch would be found at one of them only."""
    with pytest.raises(SettingError, match=r"routers is 2 and files_dir is set"):
        specs(UpSettings(routers=2, files_dir=Path("/files")))
    assert "router" in specs(UpSettings(routers=1, files_dir=Path("/files")))


def test_the_ready_file_lists_every_router(tmp_path: Path) -> None:
    found = list(specs(UpSettings(routers=2)).values())
    known: dict[str, Any] = {spec.name: {**facts(n), "pid": n} for n, spec in enumerate(found, 1)}
    path = tmp_path / "ready.json"
    write_ready_file(path, found, [spec.name for spec in found], known)
    content = json.loads(path.read_text())
    assert content["http"] == known["router"]["http"]
    routers = [process for process in content["processes"] if process["role"] == "router"]
    assert [router["name"] for router in routers] == ["router", "router-1"]
    for router in routers:
        assert router["http"] == known[router["name"]]["http"]
        assert router["grpc"] == known[router["name"]]["grpc"]
    assert all("http" not in process for process in content["processes"][2:])
