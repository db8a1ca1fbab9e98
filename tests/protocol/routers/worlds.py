"""The worlds of several routers that are explored to their end, by the ids of their tests."""

from dataclasses import replace

from tests.protocol.routers.scenario import RoutersScenario

SHARED = RoutersScenario(
    "two routers, one worker with credit for one leg", prompts=(1, 1), answers=(2, 2), max_replays=0
)
"""max_replays: nothing fails, so that a single failure would end the request."""
BUSY = replace(
    SHARED,
    name="two routers, three requests, one worker with credit for two legs",
    prompts=(1, 1, 1),
    answers=(1, 1, 2),
    owners=("R0.1", "R0.1", "R1.1"),
    credit=2,
)
PAIR = replace(SHARED, name="two routers, two workers", num_workers=2, is_settled=True)
ALONE = replace(
    SHARED,
    name="one router, whose calls and session fail",
    prompts=(1,),
    answers=(2,),
    num_routers=1,
    owners=("R0.1",),
    faults=("cut", "slow", "leave"),
    num_faults=2,
    max_replays=2,
)
"""A leg arrives after its cancel, or on a session that is over, while the next attempt runs on another one."""
RETURNED = replace(
    SHARED,
    name="a router dies and is started again",
    prompts=(1, 1, 1),
    answers=(2, 1, 1),
    owners=("R0.1", "R1.1", "R0.2"),
    faults=("crash_router",),
    num_faults=1,
)
"""max_replays: its death costs the requests of the other one no attempt."""


def struck(scenario: RoutersScenario, fault: str) -> RoutersScenario:
    """Return the same world with one fault at any moment, which may cost two attempts."""
    return replace(scenario, name=f"{scenario.name}; {fault}", faults=(fault,), num_faults=1, max_replays=2)


SMALL = {
    "shared": SHARED,
    "busy": BUSY,
    "divide": replace(struck(BUSY, "divide"), max_replays=0),
    "leave": struck(SHARED, "leave"),
}
"""Exhausted in about a second each."""
LARGE = {
    "crash": struck(SHARED, "crash"),
    "slow": struck(SHARED, "slow"),
    "cut": struck(SHARED, "cut"),
    "pair-crash": struck(PAIR, "crash"),
    "pair-cut": struck(PAIR, "cut"),
    "alone": ALONE,
    "returned": RETURNED,
}
"""Exhausted in some seconds each."""
