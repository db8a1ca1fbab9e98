"""Changes of roles at the same time: for each role that requests need a worker is left, whichever of them are made."""

from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from contract.identity import WORKER_ROLES, Role
from router.routing.policy import is_role_needed, missing_roles

P, D = Role.PREFILL, Role.DECODE
ROLES = st.lists(st.sampled_from(WORKER_ROLES), min_size=1, max_size=5)


@given(ROLES, st.data(), st.booleans())
def test_no_role_is_left_without_a_worker_by_changes_that_were_agreed(
    roles: list[Role], data: st.DataObject, embeds_only: bool
) -> None:
    """A router agrees to some changes, one after the other; each of them is made or given up later."""
    assume(not missing_roles(roles, embeds_only=embeds_only))
    agreed: dict[int, Role] = {}
    for index in data.draw(st.permutations(range(len(roles)))):
        taken = data.draw(st.sampled_from(WORKER_ROLES))
        others = [(role, other in agreed) for other, role in enumerate(roles) if other != index]
        if not is_role_needed(roles[index], taken, others, embeds_only=embeds_only):
            agreed[index] = taken
    for count in range(len(agreed) + 1):
        for made in combinations(agreed, count):
            after = [agreed[index] if index in made else role for index, role in enumerate(roles)]
            assert not missing_roles(after, embeds_only=embeds_only)


@pytest.mark.parametrize(
    ("others", "is_needed"),
    [
        ([(P, False), (D, False)], False),
        ([(P, True), (D, False)], True),
        ([(P, True), (P, False), (D, False)], False),
        ([(D, False)], True),
        ([(Role.AGGREGATED, False)], False),
        ([(Role.AGGREGATED, True), (D, False)], True),
    ],
)
def test_a_prefill_worker_may_change_while_another_one_stays(
    others: list[tuple[Role, bool]], is_needed: bool
) -> None:
    assert is_role_needed(P, D, others, embeds_only=False) is is_needed


def test_a_role_that_is_missing_already_is_no_reason() -> None:
    assert not is_role_needed(D, D, [(D, False)], embeds_only=False)
    assert not is_role_needed(D, Role.AGGREGATED, [], embeds_only=False)
