"""The folder and the name of a model."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from launch.arguments import parse
from launch.machine_settings import UpSettings
from launch.model import DEMO_NAME, check_model, demo_model_folder, find_model, model_name
from launch.service_settings import PrefillCommand, RouterCommand
from tests.checkpoints import make_foreign_checkpoint


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


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("[decode]\nmax_model_len = 9999\n", "max_model_len is 9999; the model has 256 positions"),
        ("[prefill]\ntensor_parallel_size = 2\n", "tensor_parallel_size is 2; Olmo2ForCausalLM"),
        ("[decode]\nmodel = '/other'\n", "model is '/other', but this service uses"),
        ("[decode]\ndtype = 'int3'\n", "dtype"),
        (
            "[decode]\nkv_cache_dtype = 'float16'\n",
            "kv_cache_dtype is 'float16', and the model computes float32",
        ),
    ],
)
def test_tables_of_roles_are_checked_before_a_process_starts(tmp_path: Path, table: str, told: str) -> None:
    """Only those of roles with workers: a table of another role changes nothing."""
    folder = make_foreign_checkpoint(tmp_path / "model", "olmo2")
    file = tmp_path / "kvbaton.toml"
    file.write_text(f"[up]\nmodel = '{folder}'\n{table}")
    flags = ["--config", str(file)]
    with pytest.raises(SettingError, match=told):
        check_model(parse(UpSettings, "kvbaton up", flags), folder)
    check_model(parse(UpSettings, "kvbaton up", [*flags, "--both", "1"]), folder)
