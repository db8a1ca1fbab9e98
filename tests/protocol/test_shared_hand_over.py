"""Every interleaving of small worlds in which two routers share the workers between which KV is handed over.

``docs/protocol.md`` describes worlds, checks and counter-examples.
"""

from dataclasses import replace

import pytest

from tests.protocol import mutants
from tests.protocol.explorer import Findings
from tests.protocol.routers.chart import draw
from tests.protocol.routers.exhausting import exhaust
from tests.protocol.routers.hand_over import HandOverExplorer
from tests.protocol.routers.hand_over_sides import HandOverScenario
from tests.protocol.routers.hand_over_worlds import (
    HUGE,
    LARGE,
    LONG,
    MAX_WORLDS,
    MOVED,
    ROOM_FOR_ONE,
    SMALL,
    hit,
)
from worker.router_sessions import RouterSessions

WORLDS = [
    *(pytest.param(scenario, id=name) for name, scenario in SMALL.items()),
    *(pytest.param(scenario, id=name, marks=pytest.mark.slow) for name, scenario in LARGE.items()),
    *(pytest.param(scenario, id=name, marks=pytest.mark.explore) for name, scenario in LONG.items()),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", WORLDS)
def test_no_law_breaks_in_any_order_of_events(scenario: HandOverScenario) -> None:
    """Each request of a living router ends once with the right tokens, and no lease, block or credit is left."""
    findings = exhaust(HandOverExplorer(scenario))
    ways = {taken[1:] for _, taken in findings.endings}
    assert any("moved>D0" in way for way in ways) is (scenario.num_moves > 0)
    if scenario.max_replays == 0:
        num_attempts = {sum(not rung.startswith("moved") for rung in way) for way in ways}
        assert num_attempts <= {0, 1}, "a request took more than one attempt"


@pytest.mark.explore
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", HUGE.values(), ids=HUGE)
def test_no_law_breaks_in_the_nearest_of_many_worlds(scenario: HandOverScenario) -> None:
    findings = HandOverExplorer(scenario, MAX_WORLDS).explore()
    assert findings.broken is None, draw(findings)


async def _end_all(sessions: RouterSessions, session: str) -> None:
    del sessions._streams[session]
    sessions._reports.forget(session)
    for request in sessions._accepted:
        await sessions._abort(request)
    sessions._send(sessions._shares.close(session, sessions._accepted.pop_uses()))


def _shown(findings: Findings, law: str) -> None:
    print(draw(findings))  # noqa: T201 - shown to readers of the log
    assert findings.broken is not None and law in findings.broken


@pytest.mark.timeout(600)
def test_the_end_of_a_stream_would_end_the_legs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule that it ends its own legs only."""
    monkeypatch.setattr(RouterSessions, "on_loss", _end_all)
    _shown(HandOverExplorer(hit(MOVED, "cut")).explore(), "the end of")


def test_without_a_reservation_the_other_router_takes_the_room() -> None:
    """The source has handed an answer off, and its target has no room for it."""
    scenario = replace(ROOM_FOR_ONE, rules=mutants.NO_RESERVATION)
    _shown(HandOverExplorer(scenario).explore(), "needs another attempt")
