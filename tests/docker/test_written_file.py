"""`kvbaton compose` writes the file of one machine; the shipped one is what it writes without flags."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.compose import compose, compose_text
from contract.errors import SettingError
from launch.arguments import parse
from launch.machine_settings import ComposeSettings
from tests.docker.composed import SHIPPED, by_hand, written

ROOT = Path(__file__).resolve().parents[2]


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return found


def model(folder: Path) -> Path:
    """Return a folder with the files of a model."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_the_shipped_file_is_what_the_command_writes_beside_it() -> None:
    """After a change of the template, run `kvbaton compose --overwrite` in docker/."""
    settings = parse(ComposeSettings, "kvbaton compose", ["--output", str(SHIPPED)])
    assert compose_text(settings) == SHIPPED.read_text()


def test_the_command_shows_how_to_start_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    flags = ["--prefill-devices", "0", "--decode-devices", "1-3", "--output", str(path)]
    command = [sys.executable, "-m", "cli.main", "compose", *flags]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert f"COMPOSE_PROFILES=gpu docker compose -f {path} up -d --build --wait" in run.stdout
    assert path.read_text().startswith(
        "# Written by `kvbaton compose --prefill-devices 0 --decode-devices 1-3`;"
    )


def test_numbers_of_workers_are_replicas_on_the_cpu_and_gpus_in_order(tmp_path: Path) -> None:
    path = written(tmp_path, "--prefill", "1", "--decode", "2")
    found = services(path)
    assert "deploy" not in found["prefill"]
    assert found["decode"]["deploy"] == {"replicas": 2}
    assert by_hand("cpu", {}, path)["decode"]["environment"]["KVBATON_WORKERS_ON_HOST"] == 3
    places = {
        name: str(service["environment"]["GPU_PLACE"])
        for name, service in by_hand("gpu", {}, path).items()
        if "-gpu" in name
    }
    assert places == {"prefill-gpu": "0", "decode-gpu": "1", "decode-gpu-2": "2"}
    assert path.read_text().startswith("# Written by `kvbaton compose --prefill 1 --decode 2`;")


def test_paths_lead_from_the_file_to_the_checkout(tmp_path: Path) -> None:
    path = written(tmp_path)
    found = services(path)
    build = found["router"]["build"]
    assert (tmp_path / build["context"]).resolve() == ROOT
    assert (tmp_path / build["context"] / build["dockerfile"]).is_file()
    for name in ("prometheus", "grafana"):
        sources = [volume.split(":")[0] for volume in found[name]["volumes"]]
        assert all((tmp_path / source).is_dir() for source in sources if source.startswith("."))
    (mount,) = [v for v in by_hand("cpu", {}, path)["decode"]["volumes"] if v["target"] == "/model"]
    assert (tmp_path / mount["source"] / "config.json").is_file()


def test_a_model_folder_is_mounted_where_it_lies_and_named_to_all(tmp_path: Path) -> None:
    folder = str(model(tmp_path / "llama"))
    path = written(tmp_path, "--model", folder)
    for name in ("prefill", "decode"):
        service = by_hand("cpu", {}, path)[name]
        assert service["environment"]["KVBATON_MODEL"] == folder
        assert [v["read_only"] for v in service["volumes"] if v["source"] == v["target"] == folder] == [True]
    assert by_hand("cpu", {}, path)["router"]["environment"]["MODEL_FOLDER"] == folder
    other = by_hand("cpu", {"MODEL_FOLDER": "/other"}, path)["decode"]
    assert other["environment"]["KVBATON_MODEL"] == "/other"


@pytest.mark.parametrize(
    ("flags", "param", "message"),
    [
        (["--prefill-devices", "0"], "decode_devices", "list the GPUs of both roles, or of none"),
        (["--prefill-devices", "0,1", "--decode-devices", "1,2"], "decode_devices", "has GPU 1, as prefill"),
        (
            ["--prefill", "2", "--prefill-devices", "0", "--decode-devices", "1"],
            "prefill",
            "GPUs for 1 workers",
        ),
        (
            ["--prefill-devices", "0,1", "--decode-devices", "3,4", "--tensor-parallel-size", "2"],
            "decode_devices",
            "has 3, 4 for one worker",
        ),
        (
            ["--prefill-devices", "0,1", "--decode-devices", "2", "--tensor-parallel-size", "2"],
            "decode_devices",
            "has 2 for one worker",
        ),
        (["--prefill", "0"], "prefill", "workers of both roles"),
        (["--prefill-devices", "0-", "--decode-devices", "1"], "prefill_devices", "list of GPU numbers"),
    ],
)
def test_workers_without_a_place_are_refused_by_name(
    flags: list[str], param: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        written(tmp_path, *flags)
    assert param in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text("mine")
    with pytest.raises(SettingError, match="--overwrite"):
        compose(["--output", str(path)])
    assert path.read_text() == "mine"
    compose(["--output", str(path), "--overwrite"])
    assert path.read_text() != "mine"


def test_a_model_whose_files_are_links_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "cached")
    (tmp_path / "blob").write_text("weights")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(SettingError, match=r"model\.safetensors is a link to another folder"):
        written(tmp_path, "--model", str(folder))


def test_a_path_that_compose_would_read_as_something_else_is_refused(tmp_path: Path) -> None:
    folder = model(tmp_path / "a:b$c")
    with pytest.raises(SettingError, match="cannot be written to a Compose file"):
        written(tmp_path, "--model", str(folder))
