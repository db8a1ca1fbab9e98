"""The pooling that a model folder configures."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UnsupportedFieldError
from contract.requests import PoolingParams
from prefill_service.rules import pooling_of
from tests.checkpoints import write_modules


def folder_with(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_default_pooling_is_the_last_token(tmp_path: Path) -> None:
    assert pooling_of(tmp_path, PoolingParams()) == PoolingParams("last", normalize=True)


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean_tokens", "mean"), ("lasttoken", "last"), ("max_tokens", "max")]
)
def test_the_flags_of_sentence_transformers_are_read(tmp_path: Path, mode: str, kind: str) -> None:
    modes = [
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    ]
    config = {"word_embedding_dimension": 64, "include_prompt": True}
    config |= {f"pooling_mode_{each}": each == mode for each in modes}
    assert pooling_of(folder_with(tmp_path, config), PoolingParams()).pooling_type == kind


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"pooling_mode": "cls"},
        {"pooling_mode": ["mean", "lasttoken"]},
        [],
    ],
)
def test_other_kinds_are_refused_by_name_unless_the_request_names_its_own(
    tmp_path: Path, config: Any
) -> None:
    """A41."""
    folder = folder_with(tmp_path, config)
    with pytest.raises(UnsupportedFieldError, match="1_Pooling"):
        pooling_of(folder, PoolingParams())
    own = PoolingParams("max", normalize=False)
    assert pooling_of(folder, own) == own


@pytest.mark.parametrize(("named", "kind"), [("mean", "mean"), (["lasttoken"], "last"), ("max", "max")])
def test_the_list_of_newer_versions_is_read(tmp_path: Path, named: Any, kind: str) -> None:
    folder = folder_with(tmp_path, {"pooling_mode": named})
    assert pooling_of(folder, PoolingParams()).pooling_type == kind


@pytest.mark.parametrize("further", [(), ("Normalize",)])
def test_the_vector_has_length_1_either_way(tmp_path: Path, further: tuple[str, ...]) -> None:
    write_modules(tmp_path, "mean_tokens", *further)
    assert pooling_of(tmp_path, PoolingParams()) == PoolingParams("mean", normalize=True)


def test_a_module_that_would_change_the_vector_is_refused_by_name(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean_tokens", "Dense", "Normalize")
    with pytest.raises(UnsupportedFieldError, match=r"modules\.json asks for Dense"):
        pooling_of(tmp_path, PoolingParams())


@pytest.mark.parametrize("text", ["{", "7", "[7]", '[{"idx": 0}]'])
def test_modules_that_cannot_be_read_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(UnsupportedFieldError, match=r"modules\.json cannot be read"):
        pooling_of(tmp_path, PoolingParams())
