"""Changes of roles at the same time: for each role that requests need a worker is left, whichever of them are made."""

from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from contract.identity import WORKER_ROLES, Role
from router.role_changes import is_role_needed, missing_roles

ROLES = st.lists(st.sampled_from(WORKER_ROLES), min_size=1, max_size=5)


@given(ROLES, st.data(), st.booleans())
def test_no_role_is_left_without_a_worker_by_changes_that_were_agreed(
    roles: list[Role], data: st.DataObject, embeds_only: bool
) -> None:
    """Each change alone is possible. A router agrees to some, one after the other; each of them may still be given up."""
    assume(not missing_roles(roles, embeds_only=embeds_only))
    agreed: dict[int, Role] = {}
    for index in data.draw(st.permutations(range(len(roles)))):
        taken = data.draw(st.sampled_from(WORKER_ROLES))
        if missing_roles([*roles[:index], taken, *roles[index + 1 :]], embeds_only=embeds_only):
            continue
        others = [(role, other in agreed) for other, role in enumerate(roles) if other != index]
        if not is_role_needed(taken, others, embeds_only=embeds_only):
            agreed[index] = taken
    for count in range(len(agreed) + 1):
        for made in combinations(agreed, count):
            after = [agreed[index] if index in made else role for index, role in enumerate(roles)]
            assert not missing_roles(after, embeds_only=embeds_only)


def test_two_of_three_may_change_while_the_third_stays() -> None:
    others = [(Role.PREFILL, True), (Role.PREFILL, False), (Role.DECODE, False)]
    assert not is_role_needed(Role.DECODE, others, embeds_only=False)
    assert is_role_needed(Role.DECODE, [others[0], others[2]], embeds_only=False)


def test_a_change_that_others_do_not_make_worse_is_not_refused() -> None:
    """A role that is missing already is no reason, and neither is the order of a single change."""
    assert not is_role_needed(Role.DECODE, [(Role.DECODE, True)], embeds_only=False)
    assert not is_role_needed(Role.DECODE, [], embeds_only=False)
