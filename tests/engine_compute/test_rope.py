"""Angles that depend on the longest context: they are chosen once, at the start, never by what is in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from contract.errors import SettingError
from engine.models.loading import LoadedModel, load
from engine.models.served import examine
from tests.checkpoints import (
    FOREIGN_FAMILIES,
    load_reference,
    make_checkpoint,
    make_foreign_checkpoint,
    reference_greedy,
)
from tests.engine_compute.driver import Driver

ORIGINAL = 64
SHORT = [5, 9, 2, 6]
LONG = [(37 * i + 11) % 256 for i in range(ORIGINAL + 20)]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + index / 10 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES = ("llama", "olmo2")
"""One that our decoder computes, and one that transformers computes."""


def make(folder: Path, family: str, rope: dict[str, Any]) -> Path:
    fields: dict[str, Any] = {"rope_parameters": rope}
    if rope is DYNAMIC:
        fields["max_position_embeddings"] = ORIGINAL
    if family == "phi3":  # its original length stands beside the parameters
        fields["original_max_position_embeddings"] = ORIGINAL
    if family in FOREIGN_FAMILIES:
        return make_foreign_checkpoint(folder, family, seed=3, **fields)
    return make_checkpoint(folder, family, seed=3, **fields)


def load_on_cpu(folder: Path, max_model_len: int | None = None) -> LoadedModel:
    return load(folder, "float32", max_model_len, torch.device("cpu"))


def answer(
    folder: Path, prompt: list[int], *, max_model_len: int, companion: list[int] | None = None
) -> list[int]:
    """Return eight tokens, computed in chunks of 7, perhaps beside another request."""
    driver = Driver(folder, dtype="float32", max_model_len=max_model_len)
    names = ["own"]
    driver.add("own", prompt)
    if companion is not None:
        driver.add("other", companion)
        names.append("other")
    found = driver.generate(names, 8, chunk=7)["own"]
    driver.executor.shutdown()
    return found


def reference(folder: Path, prompt: list[int], length: int) -> list[int]:
    """Return the answer of transformers with the angles of contexts of ``length``, whatever the prompt's own length is."""
    model = load_reference(folder)
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](
        model.config, torch.device("cpu"), seq_len=length
    )
    rotary.rope_type = "default"
    return reference_greedy(model, prompt, 8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_longest_context_decides_the_angles(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    folder = make(tmp_path, family, rope)
    within = reference_greedy(load_reference(folder), SHORT, 8)
    assert answer(folder, SHORT, max_model_len=ORIGINAL) == within
    beyond = reference(folder, SHORT, 128)
    assert beyond != within
    assert answer(folder, SHORT, max_model_len=128) == beyond
    # A long request in the batch changes nothing.
    assert answer(folder, SHORT, max_model_len=128, companion=LONG) == beyond
    assert answer(folder, LONG, max_model_len=128) == reference(folder, LONG, 128)


@pytest.mark.parametrize("family", [*FAMILIES, "phi3"])
def test_without_a_setting_short_texts_keep_their_angles(tmp_path: Path, family: str) -> None:
    folder = make(tmp_path, family, LONGROPE)
    assert load_on_cpu(folder).info.max_model_len == ORIGINAL
    assert examine(folder).max_model_len == ORIGINAL
    assert examine(folder, max_model_len=256).max_model_len == 256
    with pytest.raises(SettingError, match=r"max_model_len is 257; .* 2\.\.256"):
        load_on_cpu(folder, 257)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_kv_of_other_angles_is_other_kv(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    folder = make(tmp_path, family, rope)
    short, same, long = (load_on_cpu(folder, length).info.fingerprint for length in (ORIGINAL, 60, 128))
    assert short == same
    # Not only in the part behind the "@", in which KV can be converted.
    assert short.partition("@")[0] != long.partition("@")[0]
