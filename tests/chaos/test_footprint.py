"""The comparison of what processes have open before and after a load."""

from collections import Counter
from typing import Any

import pytest

from tests.chaos.footprint import Footprint

PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
NAMES = ("router", *PREFILL, *DECODE)
READER = {"socket": 2, "memfd": 2, "pidfd": 1}
SENDER = {"socket": 2}


def footprint(*met: tuple[str, str], **tasks: int) -> Footprint:
    """Return that of a service in which these decode workers have read from these prefill workers, as often as listed."""
    found = {name: {peer: Counter[str]() for peer in NAMES} for name in NAMES}
    for name in NAMES:
        found[name][name].update(socket=9, file=4)
        if name != "router":
            found[name]["router"].update(socket=2)
            found["router"][name].update(socket=2)
    for reader, sender in met:
        found[reader][sender].update(READER)
        found[sender][reader].update(SENDER)
    return Footprint({name: tasks.get(name, 20) for name in NAMES}, found)


def test_pairs_that_meet_later_are_no_growth() -> None:
    before = footprint((DECODE[0], PREFILL[0]))
    everyone = [(reader, sender) for reader in DECODE for sender in PREFILL]
    assert footprint(*everyone).beyond(before) == {}
    assert footprint().beyond(before) == {}


@pytest.mark.parametrize("reader", DECODE)
def test_a_second_connection_for_a_pair_is_growth_whether_it_had_met_or_not(reader: str) -> None:
    before = footprint((DECODE[0], PREFILL[0]))
    now = footprint((DECODE[0], PREFILL[0]), *[(reader, PREFILL[1])] * 2)
    assert now.beyond(before) == {
        reader: {"for prefill-1": {"socket": (2, 4), "memfd": (2, 4), "pidfd": (1, 2)}},
        PREFILL[1]: {f"for {reader}": {"socket": (2, 4)}},
    }


def test_what_is_for_no_peer_is_compared_process_by_process() -> None:
    before = footprint()
    before.descriptors["decode-1"]["decode-1"]["socket"] += 1
    now = footprint()
    now.descriptors["decode-0"]["decode-0"]["socket"] += 1
    now.descriptors["router"]["router"]["pipe"] += 1
    expected: dict[str, Any] = {
        "decode-0": {"for decode-0": {"socket": (9, 10)}},
        "router": {"for router": {"pipe": (0, 1)}},
    }
    assert now.beyond(before) == expected


def test_a_pair_of_other_roles_has_its_own_bound() -> None:
    """Decode workers may read from prefill workers; none may begin to read from the other decode worker."""
    before = footprint((DECODE[0], PREFILL[0]))
    assert set(footprint((DECODE[0], DECODE[1])).beyond(before)) == set(DECODE)


def test_more_tasks_are_growth() -> None:
    assert footprint(router=21).beyond(footprint()) == {"router": {"tasks": (20, 21)}}
    assert footprint(router=19).beyond(footprint()) == {}
    assert footprint().as_dict()["router"] == {"tasks": 20, "descriptors": 21}
