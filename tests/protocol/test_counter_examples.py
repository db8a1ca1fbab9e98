"""With one rule removed the explorer finds a way to break a law, and shows it step by step."""

from dataclasses import replace

import pytest

from tests.protocol import mutants
from tests.protocol.chart import draw
from tests.protocol.explorer import Explorer
from tests.protocol.scenario import Rules, Scenario
from tests.protocol.worlds import (
    CHUNKED,
    DRAINED,
    LEASE_ALONE,
    LEFT_WHILE_MOVED,
    MAX_WORLDS,
    ONE,
    STATES,
    STATES_LEASE_ALONE,
    TWO,
    TWO_LEASE_ALONE,
    TWO_MOVED,
    WINDOW,
    WINDOW_LEASE_ALONE,
    struck,
)

MISSING = [
    pytest.param(
        struck(LEASE_ALONE, "late"),
        mutants.NO_QUARANTINE,
        "writes into block 1, which is free",
        14,
        id="quarantine",
    ),
    pytest.param(
        struck(TWO_LEASE_ALONE, "starve_read"),
        mutants.NO_SECOND_CHECK,
        "misread: ",
        19,
        id="second lease check",
    ),
    pytest.param(
        struck(replace(ONE, checks_digests=False), "doubt"),
        mutants.NO_ATTEMPT,
        "misread: ",
        18,
        id="attempt",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        struck(CHUNKED, "break"), mutants.EAGER_READING, "is read into twice at once", 12, id="terminal first"
    ),
    pytest.param(struck(ONE, "sever"), mutants.TIRELESS, "is read again and again", 12, id="each rung once"),
    pytest.param(
        replace(TWO, name="two requests, eager"),
        mutants.EAGER_RESERVATION,
        "without any fault only a deadline ends this",
        16,
        id="memory order",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        LEFT_WHILE_MOVED, mutants.NO_NEXT_ATTEMPT, "lease:0#0.1 holds 2 blocks", 12, id="next attempt"
    ),
    pytest.param(
        TWO_MOVED,
        mutants.NO_RESERVATION,
        "needs another attempt, and nothing has failed",
        16,
        id="reservation first",
    ),
    pytest.param(
        WINDOW,
        mutants.ONE_GROUP_LENT,
        "of the window's is free, and lent",
        8,
        id="a window's blocks are lent",
    ),
    pytest.param(
        WINDOW, mutants.ONE_GROUP_READ, "of the window's, which holds", 20, id="a window's blocks are read"
    ),
    pytest.param(
        struck(WINDOW_LEASE_ALONE, "late"),
        mutants.ONE_GROUP_QUARANTINED,
        "of the window's, which is free",
        17,
        id="a window's quarantine",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        STATES, mutants.EARLY_STATES, "with the states behind 2 tokens, not 3", 5, id="states come last"
    ),
    pytest.param(STATES, mutants.SLOT_NOT_LENT, "without a slot", 8, id="a slot is lent"),
    pytest.param(STATES, mutants.ONE_GROUP_READ, "slot 1, which holds", 20, id="a slot is read"),
    pytest.param(
        struck(STATES_LEASE_ALONE, "late"),
        mutants.SLOT_NOT_QUARANTINED,
        "slot 1, which is free",
        17,
        id="a slot's quarantine",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("scenario", "rules", "law", "num_steps"), MISSING)
def test_a_rule_that_is_taken_out_is_missed(
    scenario: Scenario, rules: Rules, law: str, num_steps: int
) -> None:
    explorer = Explorer(replace(scenario, rules=rules))
    findings = explorer.explore()
    assert findings.broken is not None and law in findings.broken
    chart = draw(findings, explorer.rules)
    print(chart)  # noqa: T201 - shown to readers of the log
    assert len(findings.steps) <= num_steps, chart
    assert f"{len(findings.steps)} steps" in chart


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("scenario", "rules", "law", "num_steps"), MISSING)
def test_production_breaks_nothing_there(scenario: Scenario, rules: Rules, law: str, num_steps: int) -> None:
    """Explore twice as many worlds of the same scenario as it takes to find what the mutant breaks."""
    mutant = Explorer(replace(scenario, rules=rules)).explore()
    assert Explorer(scenario, max_worlds=2 * mutant.num_worlds).explore().broken is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_that_leaves_with_a_leg_on_its_way_costs_a_failure() -> None:
    """It is empty, and the call that starts a leg arrives nowhere: the router must report first that none is bound."""
    findings = Explorer(replace(DRAINED, rules=mutants.EARLY_LEAVE)).explore()
    assert {how for how, _ in findings.endings} == {"answered", "error worker_lost"}


@pytest.mark.explore
@pytest.mark.timeout(900)
def test_digests_alone_keep_reads_right_as_well() -> None:
    """Without the second check of the lease a digest still fails what was overwritten."""
    scenario = replace(
        struck(TWO_LEASE_ALONE, "starve_read"), checks_digests=True, rules=mutants.NO_SECOND_CHECK
    )
    findings = Explorer(scenario, MAX_WORLDS).explore()
    assert findings.broken is None


def test_a_flipped_byte_is_seen_where_no_digest_is_checked() -> None:
    findings = Explorer(struck(replace(ONE, checks_digests=False), "corrupt")).explore()
    assert findings.broken is not None and "misread: " in findings.broken
