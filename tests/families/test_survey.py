"""Families of transformers: the table in docs/models.md is true."""

import pytest

from engine.models.transformers_rules import TRIED
from tests.chaos.settings import chaos_rng
from tests.families.survey import EQUAL, EQUAL_ALONE, NOT_MADE, WRONG, WRONG_BEHIND, outcome, read_table
from tests.families.tiny_models import families
from tests.soak_settings import soak_factor


def test_the_table_has_each_family_once() -> None:
    table = read_table()
    assert sorted(table) == families()
    found = list(table.values())
    assert not [reason for reason in found if reason.startswith((WRONG, WRONG_BEHIND))]
    assert found.count(EQUAL) > 140
    assert found.count(NOT_MADE) < 5


def test_each_family_that_is_equal_is_known_to_the_check() -> None:
    """``kvbaton check`` promises nothing of a family that was never tried."""
    equal = {family for family, found in read_table().items() if found in (EQUAL, EQUAL_ALONE)}
    assert equal - TRIED == {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_family_has_the_outcome_of_the_table() -> None:
    """A soak tries all of them, else a tenth."""
    table = read_table()
    num_tried = len(table) if soak_factor() > 1 else len(table) // 10
    tried = chaos_rng("families").sample(sorted(table), num_tried)
    assert {family: outcome(family) for family in tried} == {family: table[family] for family in tried}
