"""Every order of events in small worlds of workers that change their roles and drain; and what each rule is for.

``docs/protocol.md`` describes worlds, checks and counter-examples.
"""

import sys
from dataclasses import replace

import pytest

from contract.identity import Role
from tests.protocol.flip_explorer import FlipExplorer
from tests.protocol.flip_world import FlipRules, FlipScenario

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
SWAP = FlipScenario("two workers swap their roles", (P, D), (0, 0), ((0, "decode"), (1, "prefill")))
BACK = replace(SWAP, name="one of them changes back", changes=((0, "decode"), (0, "prefill"), (1, "prefill")))
TO_PREFILL = FlipScenario(
    "both become prefill, two routers", (D, D), (0, 1), ((0, "prefill"), (1, "prefill")), decoded=(0, 1)
)
TO_DECODE = FlipScenario("both become decode, two routers", (P, P), (0, 1), ((0, "decode"), (1, "decode")))
TWO_DRAINS = FlipScenario(
    "both drain, two routers", (D, D), (0, 1), ((0, "drain"), (1, "drain")), decoded=(0, 1)
)
UNDRAINED = replace(
    TWO_DRAINS,
    name="one drains and serves again, the other one becomes prefill, two routers",
    changes=((0, "drain"), (0, "undrain"), (1, "prefill")),
)
THROUGH_DECODE = replace(
    SWAP, name="a prefill worker becomes decode and then both", changes=((0, "decode"), (0, "both"))
)
ENDED = FlipScenario(
    "a drain ends a change, and is undone, two routers",
    (D, D),
    (0, 1),
    ((0, "prefill"), (0, "drain"), (0, "undrain")),
    decoded=(0,),
)
OPPOSITE = FlipScenario(
    "all that prefill are to decode, two routers",
    (P, B),
    (0, 1),
    ((0, "decode"), (1, "decode")),
    keeps_roles=True,
)
WORLDS = [
    SWAP,
    BACK,
    TO_PREFILL,
    TO_DECODE,
    TWO_DRAINS,
    UNDRAINED,
    THROUGH_DECODE,
    replace(
        UNDRAINED,
        name="both drain, one serves again",
        requests=(0, 0),
        changes=((0, "drain"), (0, "undrain"), (1, "drain")),
    ),
    FlipScenario(
        "three workers; one drains, serves again and becomes prefill",
        (P, D, D),
        (0, 0),
        ((1, "drain"), (1, "undrain"), (1, "prefill")),
        decoded=(1,),
    ),
    ENDED,
    OPPOSITE,
    FlipScenario("decode and both", (D, B), (0, 0), ((0, "both"), (1, "prefill")), decoded=(0,)),
]
LARGE = [
    replace(SWAP, name=f"{SWAP.name}, two routers", requests=(0, 1)),
    replace(SWAP, name=f"{SWAP.name} and back", changes=(*SWAP.changes, (0, "prefill"), (1, "decode"))),
]
MISSING = [
    pytest.param(SWAP, FlipRules(never_binds=False), "deadlock", 22, id="law 4 b"),
    pytest.param(SWAP, FlipRules(never_moves=False), "deadlock", 27, id="law 4 c"),
    pytest.param(TO_PREFILL, FlipRules(waits_for_answers=False), "deadlock", 20, id="answers, prefill"),
    pytest.param(
        TO_DECODE,
        FlipRules(waits_for_answers=False),
        "deadlock",
        22,
        id="answers, decode",
        marks=pytest.mark.slow,
    ),
    pytest.param(TWO_DRAINS, FlipRules(waits_for_answers=False), "deadlock", 16, id="answers, drains"),
    pytest.param(
        UNDRAINED,
        FlipRules(never_moves=False),
        "deadlock",
        33,
        id="law 4 c, undrained",
        marks=pytest.mark.slow,
    ),
    pytest.param(SWAP, FlipRules(waits_for_former=False), "refuses a leg", 10, id="former legs"),
    pytest.param(THROUGH_DECODE, FlipRules(flips_settled=False), "refuses a leg", 13, id="settled before"),
    pytest.param(ENDED, FlipRules(offers_again=False), "offers its credit", 17, id="offered again"),
    pytest.param(OPPOSITE, FlipRules(keeps_roles=False), "no worker is left", 12, id="roles kept"),
    pytest.param(SWAP, FlipRules(reports_end=False), "never settled", 26, id="reports of the end"),
]


def exhausted(scenario: FlipScenario) -> None:
    findings = FlipExplorer(scenario).explore()
    assert findings.broken is None, findings.steps
    assert findings.num_quiet > 0
    sys.stderr.write(
        f"\n{scenario.name}: {findings.num_worlds} worlds, {findings.num_moved} of them after a move"
    )
    has_moves = any(
        role in (D, B) and what in ("drain", "prefill")
        for (one, what) in scenario.changes
        for role in [scenario.roles[one]]
    )
    assert (findings.num_moved > 0) is has_moves


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            each, id=each.name, marks=[pytest.mark.slow] if each in (TO_DECODE, UNDRAINED, OPPOSITE) else []
        )
        for each in WORLDS
    ],
)
def test_nothing_waits_for_ever_while_roles_change(scenario: FlipScenario) -> None:
    """No deadlock, no leg refused, and every worker is settled again, in any order of messages and legs."""
    exhausted(scenario)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scenario", LARGE, ids=lambda scenario: scenario.name)
def test_nothing_waits_for_ever_in_larger_worlds(scenario: FlipScenario) -> None:
    exhausted(scenario)


@pytest.mark.parametrize(("scenario", "rules", "law", "num_steps"), MISSING)
def test_a_rule_about_roles_that_is_taken_out_is_missed(
    scenario: FlipScenario, rules: FlipRules, law: str, num_steps: int
) -> None:
    findings = FlipExplorer(replace(scenario, rules=rules)).explore()
    assert findings.broken is not None and law in findings.broken
    print("\n".join([scenario.name, *findings.steps, findings.broken]))  # noqa: T201 - shown to readers of the log
    assert len(findings.steps) <= num_steps, findings.steps
