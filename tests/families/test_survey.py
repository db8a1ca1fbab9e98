"""Families of transformers: the table in docs/models.md is true."""

from pathlib import Path

import pytest
import torch

from engine.models.loading import load
from engine.models.transformers_types import TRIED
from tests.chaos.settings import chaos_rng
from tests.checkpoints import write_checkpoint
from tests.families.survey import (
    EQUAL,
    NOT_TRIED,
    PAGE,
    TRANSPORTS,
    WRONG,
    outcome,
    read_outcomes,
    table_of,
)
from tests.families.tiny_models import families, is_text_decoder, make_tiny
from tests.soak_settings import soak_factor


def test_each_family_has_one_outcome_and_none_is_wrong() -> None:
    outcomes = read_outcomes()
    assert list(outcomes) == families()
    assert not [family for family, found in outcomes.items() if found.verdict in (NOT_TRIED, WRONG)]


def test_each_family_that_is_served_is_handed_over() -> None:
    """Its KV, its states, or both."""
    served = {family: found for family, found in read_outcomes().items() if found.verdict == EQUAL}
    assert not [family for family, found in served.items() if found.over != TRANSPORTS]


def test_the_page_has_the_outcomes() -> None:
    assert table_of(read_outcomes()) in PAGE.read_text()


def test_most_decoders_are_served() -> None:
    """The numbers that a release promises."""
    decoders = [found for family, found in read_outcomes().items() if is_text_decoder(family)]
    assert len(decoders) == 141
    assert sum(found.verdict == EQUAL for found in decoders) >= 108


def test_each_family_that_is_equal_is_known_to_the_check() -> None:
    """``kvbaton check`` promises nothing of a family that was never tried."""
    equal = {family for family, found in read_outcomes().items() if found.verdict == EQUAL}
    assert equal - TRIED == {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("gptj", id="attention in a method"),
        pytest.param("modernbert-decoder", id="a head that is called decoder"),
        pytest.param("zamba2", id="layers without numbers"),
    ],
)
def test_models_that_are_built_otherwise_are_equal(family: str) -> None:
    found = outcome(family)
    assert found.verdict == EQUAL
    assert found == read_outcomes()[family]


def test_queries_that_are_rotated_in_float32_are_served_in_16_bits(tmp_path: Path) -> None:
    """CodeGen does so; the cache has the dtype of the values."""
    write_checkpoint(tmp_path, make_tiny("codegen"), 3)
    assert load(tmp_path, "bfloat16", None, torch.device("cpu")).config.num_layers == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_family_has_the_outcome_of_the_table() -> None:
    """A soak tries all of them, else a tenth."""
    outcomes = read_outcomes()
    num_tried = len(outcomes) if soak_factor() > 1 else len(outcomes) // 10
    tried = chaos_rng("families").sample(sorted(outcomes), num_tried)
    assert {family: outcome(family) for family in tried} == {family: outcomes[family] for family in tried}
