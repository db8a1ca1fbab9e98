"""The worlds of several routers whose workers hand KV over, explored to their end, by the ids of their tests."""

from dataclasses import replace

from tests.protocol.routers.hand_over_sides import HandOverScenario

HANDED_OVER = HandOverScenario(
    "two routers, a prefill and a decode worker",
    prompts=(1, 1),
    answers=(2, 2),
    credit=2,
    prefill_blocks=2,
    decode_blocks=2,
    prefill_chunk=4,
    max_replays=0,
)
"""max_replays: nothing fails, so that a single failure would end the request."""
MOVED = replace(
    HANDED_OVER,
    name="two routers, each moves an answer from the same worker to the same one",
    answers=(3, 3),
    prefill_blocks=4,
    num_moves=1,
)
"""An answer is moved while the other router binds, moves, or ends its own."""
ROOM_FOR_ONE = replace(MOVED, name=f"{MOVED.name}, with room for one", fetching_credit=1)
MOVED_BESIDE = replace(
    MOVED, name="two routers; one of them moves its answer to a worker of both", answers=(3, 2)
)
"""The other one has a token left after its first one, and does not move."""
MOVED_ALONE = replace(
    MOVED,
    name="two routers; one of them moves an answer, the other one is idle",
    prompts=(1,),
    answers=(3,),
    owners=("R0.1",),
)


def drained(scenario: HandOverScenario) -> HandOverScenario:
    """Return the same world, in which the worker that lends drains and serves again, and answers are moved only then."""
    return replace(
        scenario,
        name=f"{scenario.name}; drain",
        moves_when_drained=True,
        faults=("drain",),
        num_faults=1,
        struck="P",
    )


def hit(scenario: HandOverScenario, fault: str, struck: str = "", max_replays: int = 2) -> HandOverScenario:
    """Return the same world with one fault at any moment, which may cost ``max_replays`` attempts."""
    return replace(
        scenario,
        name=f"{scenario.name}; {fault} {struck}",
        faults=(fault,),
        num_faults=1,
        struck=struck,
        max_replays=max_replays,
    )


SMALL = {
    "handed-over": HANDED_OVER,
    "moved": MOVED,
    "room-for-one": ROOM_FOR_ONE,
    "left": hit(MOVED_BESIDE, "leave", max_replays=0),
    "drained": drained(MOVED_ALONE),
}
"""Exhausted in some seconds each."""
LARGE = {
    "dead-router": hit(MOVED_BESIDE, "crash_router", max_replays=0),
    "handed-over-left": hit(HANDED_OVER, "leave", max_replays=0),
    "dead-sender": hit(MOVED_ALONE, "crash", "P"),
    "dead-target": hit(MOVED_ALONE, "crash", "D"),
    "cut": hit(MOVED_ALONE, "cut"),
    "cut-link": hit(MOVED_ALONE, "cut_link"),
}
"""Exhausted in up to half a minute each. The death of one router costs the requests of the other one no attempt."""
LONG = {
    "dead-router-handed-over": hit(HANDED_OVER, "crash_router", max_replays=0),
    "dead-sender-beside": hit(MOVED_BESIDE, "crash", "P"),
    "drained-beside": drained(MOVED_BESIDE),
}
"""Exhausted in up to a minute each."""
HUGE = {
    "dead-router-moved": hit(MOVED, "crash_router", max_replays=0),
    "dead-target-beside": hit(MOVED_BESIDE, "crash", "D"),
    "cut-beside": hit(MOVED_BESIDE, "cut", "R0"),
    "handed-over-cut": hit(HANDED_OVER, "cut"),
}
"""Explored as far as ``MAX_WORLDS``, nearest first."""
MAX_WORLDS = 300_000
