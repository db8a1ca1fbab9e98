"""The folder and the name of a model."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from launch.model import DEMO_NAME, demo_model_folder, find_model, model_name
from launch.router_settings import RouterCommand
from launch.worker_settings import PrefillCommand


def test_a_local_folder_is_taken_and_named_after_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path.resolve()
    assert model_name(str(tmp_path)) == tmp_path.name


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"contains no config\.json"):
        find_model(str(tmp_path))


def test_a_path_that_is_not_a_folder_is_refused() -> None:
    with pytest.raises(SettingError, match="neither an existing folder nor a Hugging Face id"):
        find_model("./no/such/folder")


def test_the_demo_model_lies_in_the_package() -> None:
    import kvbaton

    assert demo_model_folder().parent == Path(kvbaton.__file__).parent
    assert model_name("demo") == "kvbaton-demo"


def test_a_hugging_face_id_keeps_its_name() -> None:
    assert model_name("org/name") == "org/name"


def test_a_router_names_a_model_as_the_workers_do() -> None:
    """Else the name would depend on whether the router read the model itself."""
    given: dict[str, Any] = {"model": "demo", "secret_file": "secret"}
    assert RouterCommand(**given).served_model_name == PrefillCommand(**given).served_model_name == DEMO_NAME
    assert RouterCommand(secret_file=Path("secret")).served_model_name is None
    assert RouterCommand(**given, served_model_name="mine").served_model_name == "mine"
