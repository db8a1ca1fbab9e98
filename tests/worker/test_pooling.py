"""How a model folder says that its prompts are pooled."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import UnsupportedFieldError
from contract.requests import PoolingParams
from worker.pooling import pooling_of


def folder_with(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_without_a_configuration_it_is_the_last_token(tmp_path: Path) -> None:
    assert pooling_of(tmp_path) == PoolingParams("last", normalize=True)


@pytest.mark.parametrize(("mode", "kind"), [("mean_tokens", "mean"), ("lasttoken", "last")])
def test_as_sentence_transformers_writes_it(tmp_path: Path, mode: str, kind: str) -> None:
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
    assert pooling_of(folder_with(tmp_path, config)).kind == kind


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_cls_token": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        [],
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, config: Any) -> None:
    with pytest.raises(UnsupportedFieldError, match="1_Pooling"):
        pooling_of(folder_with(tmp_path, config))
