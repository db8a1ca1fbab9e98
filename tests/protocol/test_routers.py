"""Every interleaving of small worlds of several routers: they share credit, and the end of one costs the others nothing.

``docs/protocol.md`` describes worlds, checks and counter-examples.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.protocol.routers.chart import draw
from tests.protocol.routers.exhausting import exhaust
from tests.protocol.routers.rules import RoutersExplorer
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.world import Session
from tests.protocol.routers.worlds import ALONE, LARGE, SMALL
from worker.credit_shares import DividedLimit

WORLDS = [
    *(pytest.param(scenario, id=name) for name, scenario in SMALL.items()),
    *(pytest.param(scenario, id=name, marks=pytest.mark.slow) for name, scenario in LARGE.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", WORLDS)
def test_no_law_breaks_in_any_order_of_events(scenario: RoutersScenario) -> None:
    """Every request whose router lives is answered, with the attempts that the fault can cost it, and nothing is left."""
    findings = exhaust(RoutersExplorer(scenario))
    assert {taken[0] for _, taken in findings.endings} == set(scenario.owners)
    if scenario.max_replays == 0:
        assert {len(taken) for _, taken in findings.endings} == {2}, "a request took more than one attempt"


def _forget_what_is_committed(limit: DividedLimit, holder: str, used: int, *, has_seen_all: bool) -> None:
    share = limit._shares[holder]
    share.committed = max(used, share.share)


def _in_any_sequence(session: Session) -> Iterator[int]:
    yield from range(len(session.orders))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenario", "owner", "name", "rule", "law"),
    [
        pytest.param(
            SMALL["divide"],
            DividedLimit,
            "report",
            _forget_what_is_committed,
            "holds more legs than it was given",
            id="committed",
        ),
        pytest.param(ALONE, Session, "next_orders", _in_any_sequence, "no router waits", id="sequence"),
    ],
)
def test_a_rule_that_is_removed_is_missed(
    scenario: RoutersScenario,
    owner: type,
    name: str,
    rule: Callable[..., Any],
    law: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lowered share stays committed until its router has answered, and no cancel arrives before the leg that it ends."""
    monkeypatch.setattr(owner, name, rule)
    findings = RoutersExplorer(scenario).explore()
    print(draw(findings))  # noqa: T201 - shown to readers of the log
    assert findings.broken is not None and law in findings.broken
