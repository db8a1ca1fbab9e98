"""The table of roles has the rules of every role, and a worker that has flipped goes by those of its new one."""

import itertools

import pytest

from contract.identity import WORKER_ROLES, Role
from roles.table import ROLES
from tests.role_engines import info_of, settings_of
from worker.lifecycle import Lifecycle
from worker.role_rules import LegCall

PAIRS = list(itertools.product(WORKER_ROLES, WORKER_ROLES))


def test_the_table_has_every_role_that_a_worker_may_have() -> None:
    assert set(ROLES) == set(WORKER_ROLES)


@pytest.mark.parametrize(("former", "new"), PAIRS, ids=lambda role: role.value)
def test_a_flip_finds_the_rules_of_the_other_role(former: Role, new: Role) -> None:
    """Until the worker is settled it serves what either role serves, and then what the new one does."""
    lifecycle = Lifecycle(former, ROLES)
    lifecycle.set_role(new, 1)
    assert lifecycle.rules is ROLES[new]
    both = ROLES[new].calls.keys() | (ROLES[former].calls.keys() if former is not new else set())
    assert {call for call in LegCall if lifecycle.reader_of(call)} == both
    lifecycle.is_unsettled = False
    assert {call for call in LegCall if lifecycle.reader_of(call)} == ROLES[new].calls.keys()


def test_an_aggregated_worker_is_a_decode_worker_that_embeds() -> None:
    both, decode, prefill = (ROLES[role] for role in (Role.AGGREGATED, Role.DECODE, Role.PREFILL))
    assert both.calls == {**decode.calls, LegCall.EMBED: prefill.calls[LegCall.EMBED]}
    settings, info = settings_of(max_queued_tokens=1), info_of(50)
    assert both.credit(settings, info) == decode.credit(settings, info) != prefill.credit(settings, info)
    assert both.has_mixed_kv(num_leases=1, num_fetches=0) and not both.has_mixed_kv(
        num_leases=0, num_fetches=1
    )
