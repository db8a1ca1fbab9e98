"""Every interleaving of small worlds: production's schedulers, transfers, transitions and lease book keep the laws.

``docs/protocol.md`` describes worlds, checks and counter-examples.
"""

import sys
from dataclasses import replace

import pytest

from kv_transfer.protocol.events import RetryStep
from tests.protocol.chart import draw
from tests.protocol.explorer import Explorer, Findings
from tests.protocol.scenario import Scenario
from tests.protocol.worlds import (
    DRAINS,
    HEALED,
    HUGE,
    LADDER,
    LARGE,
    LARGE_DRAINS,
    MAX_WORLDS,
    QUICK_STATES,
    QUICK_WINDOWS,
    RUNGS,
    SMALL,
)


def explored(scenario: Scenario) -> Findings:
    explorer = Explorer(scenario)
    findings = explorer.explore()
    assert findings.broken is None, draw(findings, explorer.rules)
    assert findings.is_complete
    assert findings.num_quiet > 0
    sys.stderr.write(
        f"\n{scenario.name}: {findings.num_worlds} worlds, {findings.num_steps} steps, {findings.num_calls} calls"
        f" of production code, {findings.cpu_seconds:.1f} s"
    )
    return findings


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", [*QUICK_WINDOWS, *QUICK_STATES], ids=lambda scenario: scenario.name)
def test_the_blocks_of_two_groups_of_layers_are_handed_over(scenario: Scenario) -> None:
    """In any order of events, and each group keeps the laws; of the window only what is seen is looked at.

    The second group may be the slots of a recurrent layer: what is published, received and continued is the state behind all
    tokens before.
    """
    endings = explored(scenario).endings
    assert {how for how, _ in endings} == {"answered"}
    assert (("answered", ("local>P0", "moved>D0")) in endings) == (scenario.num_moves > 0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.name)
def test_no_law_breaks_in_any_order_of_events(scenario: Scenario) -> None:
    findings = explored(scenario)
    endings = {how for how, _ in findings.endings}
    assert "answered" in endings
    if not scenario.faults:
        assert endings == {"answered", *(["cancelled"] if scenario.may_leave else [])}
    if scenario.num_moves:
        assert ("answered", ("local>P0", "moved>D0")) in findings.endings
    if scenario.num_moves and scenario.num_decode > 1:
        assert ("answered", ("local>P0", "moved>D0", "moved>D1")) in findings.endings


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "scenario",
    [*DRAINS, *(pytest.param(each, marks=pytest.mark.explore) for each in LARGE_DRAINS)],
    ids=lambda scenario: scenario.name,
)
def test_every_request_is_answered_through_drains(scenario: Scenario) -> None:
    """No worker fails: no deadline is needed, nothing is left anywhere, and every answer is whole."""
    findings = explored(scenario)
    assert {how for how, _ in findings.endings} == {"answered"}
    assert max(len(rungs) for _, rungs in findings.endings) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ladder_is_climbed_rung_by_rung() -> None:
    """Blocks are read again, in vain: another prefill worker is tried, then the decode worker computes the prompt itself."""
    findings = explored(LADDER)
    assert findings.endings == {
        ("answered", ("P0>D0",)),
        ("answered", ("P0>D0", "P1>D0")),
        ("answered", ("P0>D0", "P1>D0", "local>D0")),
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", HEALED, ids=lambda scenario: scenario.name)
def test_a_read_that_fails_is_healed_by_another(scenario: Scenario) -> None:
    """Over another transport and then once more over that one, before another attempt is made."""
    explorer = Explorer(scenario)
    findings = explorer.explore()
    assert findings.broken is None, draw(findings, explorer.rules)
    rungs = tuple(RetryStep)[2 - scenario.num_transports :]
    assert explorer.rules.sink.climbed == {rungs[:height] for height in range(len(rungs) + 1)}
    is_always_healed = scenario.num_faults <= len(rungs)
    assert ({how for how, _ in findings.endings}, len(findings.endings) == 1) == (
        {"answered"},
        is_always_healed,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_law_breaks_where_transports_fail_for_good() -> None:
    endings = {how for how, _ in explored(RUNGS).endings}
    assert endings == {"answered", "error transfer_failed"}


@pytest.mark.timeout(600)
def test_the_ladder_ends_with_one_error() -> None:
    """No further attempt is allowed."""
    endings = explored(replace(LADDER, name="no third attempt", num_prefill=1, max_replays=1)).endings
    assert ("error transfer_failed", ("P0>D0", "P0>D0")) in endings


@pytest.mark.explore
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", LARGE, ids=lambda scenario: scenario.name)
def test_no_law_breaks_in_larger_worlds(scenario: Scenario) -> None:
    assert "answered" in {how for how, _ in explored(scenario).endings}


@pytest.mark.explore
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", HUGE, ids=lambda scenario: scenario.name)
def test_no_law_breaks_as_far_as_memory_reaches(scenario: Scenario) -> None:
    explorer = Explorer(scenario, max_worlds=MAX_WORLDS)
    findings = explorer.explore()
    assert findings.broken is None, draw(findings, explorer.rules)
    assert findings.is_complete or findings.num_worlds > MAX_WORLDS
