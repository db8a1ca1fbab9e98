"""The worlds that are explored to their end, by topic."""

from dataclasses import replace

from tests.protocol.scenario import Scenario
from tests.protocol.walking import ALL_FAULTS

ONE = Scenario("one request of two blocks", prefill_chunk=4, max_replays=1)
"""Both blocks are published at once. max_replays: an attempt fails, and the one behind it may fail too."""
CHUNKED = replace(ONE, name="one request, published block by block", prefill_chunk=2)
TWO = Scenario("two requests, pools that hold one", prompts=(3, 3), answers=(2, 2), prefill_chunk=4)
LEASE_ALONE = replace(
    ONE, name="one-sided reads that cannot be stopped, no digests", is_one_sided=True, checks_digests=False
)
TWO_LEASE_ALONE = replace(
    TWO, name=f"{TWO.name}; {LEASE_ALONE.name}", is_one_sided=True, checks_digests=False
)


MOVED = Scenario(
    "one request that is moved while it is decoded",
    answers=(4,),
    prefill_blocks=4,
    decode_blocks=4,
    prefill_chunk=4,
    max_replays=1,
    num_moves=1,
)
"""It begins on the worker that lends it later, and may be moved after any token, or not at all."""
MOVED_ON = replace(MOVED, name=f"{MOVED.name}, with two targets", answers=(3,), num_decode=2)
"""The second one continues it, with the same lease, if the first one fails."""
TWO_MOVED = replace(
    MOVED,
    name="two requests that are moved, and room for one",
    prompts=(1, 1),
    answers=(3, 3),
    prefill_blocks=4,
    decode_credit=1,
)
"""Each may be moved when the target has room: while the other is not there, or has ended."""
LEFT_WHILE_MOVED = replace(MOVED, name=f"{MOVED.name}, or left by its client", may_leave=True)


def struck(scenario: Scenario, fault: str, num_faults: int = 1) -> Scenario:
    """Return the same world with faults at any moment."""
    return replace(scenario, name=f"{scenario.name}; {fault}", faults=(fault,), num_faults=num_faults)


LAYERS = replace(CHUNKED, name="one request, its last block published layer by layer", num_layer_groups=2)


WINDOW = Scenario(
    "one request, a layer with a window",
    prompts=(5,),
    prefill_blocks=4,
    decode_blocks=4,
    max_replays=1,
    window=3,
)
"""The first block of the window is freed before the last two are lent; of the other group three blocks are lent."""
WINDOW_AT_ONCE = replace(WINDOW, name=f"{WINDOW.name}, at once", prompts=(3,), prefill_chunk=4, window=2)
"""Three blocks are lent: two of all tokens, and one of the window."""
WINDOW_REUSED = replace(
    WINDOW, name=f"{WINDOW.name} that holds less than the prompt", window=2, window_blocks=2
)
"""A prompt's third block takes the place of its first one."""
TWO_WINDOWS = replace(
    WINDOW, name="two requests, a layer with a window, pools that hold one", prompts=(5, 5), answers=(2, 2)
)
WINDOW_MOVED = replace(MOVED, name=f"{MOVED.name}, a layer with a window", window=3)
WINDOW_LEASE_ALONE = replace(
    WINDOW_AT_ONCE,
    name=f"{WINDOW.name}; {LEASE_ALONE.name}",
    is_one_sided=True,
    checks_digests=False,
)
STATES = Scenario("one request, a recurrent layer", max_replays=1, num_slots=1)
"""The slot is lent behind the blocks, when the whole prompt is computed, and received beside them."""
STATES_AT_ONCE = replace(STATES, name=f"{STATES.name}, at once", prefill_chunk=4)
TWO_STATES = replace(
    TWO, name="two requests, a recurrent layer, one slot", prefill_blocks=6, decode_blocks=6, num_slots=1
)
"""Blocks are plenty: the second one waits for a slot on each side."""
STATES_CACHED = replace(
    STATES,
    name="two requests that share a prefix, a recurrent layer",
    prompts=(3, 3),
    answers=(2, 2),
    prefill_blocks=6,
    decode_blocks=6,
    prefill_chunk=4,
    caches_prefixes=True,
    shares_prompt=True,
    num_slots=2,
)
"""The second one finds KV in the receiver's cache, and no states."""
STATES_MOVED = replace(MOVED, name=f"{MOVED.name}, a recurrent layer", num_slots=1)
STATES_LEASE_ALONE = replace(
    STATES_AT_ONCE, name=f"{STATES.name}; {LEASE_ALONE.name}", is_one_sided=True, checks_digests=False
)
QUICK_STATES = [STATES, STATES_MOVED, struck(STATES_AT_ONCE, "corrupt")]
"""Worlds with a slot of states that every quick test run exhausts."""
QUICK_WINDOWS = [WINDOW, WINDOW_REUSED, WINDOW_MOVED, struck(WINDOW_AT_ONCE, "corrupt")]
"""Worlds with two groups of layers that every quick test run exhausts."""


SMALL = [
    CHUNKED,
    TWO,
    replace(TWO, name=f"{TWO.name}, block by block", prefill_chunk=2),
    *(
        struck(ONE, fault)
        for fault in ("crash", "cut", "repeat", "delay", "corrupt", "break", "spoil", "starve", "leave")
    ),
    *(struck(LEASE_ALONE, fault) for fault in ("leave", "starve_read", "cut")),
    struck(CHUNKED, "spoil"),
    *(struck(LAYERS, fault) for fault in ("corrupt", "break")),
    MOVED,
    TWO_MOVED,
    LEFT_WHILE_MOVED,
    *(struck(MOVED_ON, fault) for fault in ("crash", "cut")),
    *(
        struck(MOVED, fault)
        for fault in ("crash", "cut", "repeat", "delay", "corrupt", "break", "spoil", "starve")
    ),
]
"""Worlds that every test run exhausts."""
LARGE = [
    *(struck(ONE, fault) for fault in ("deaf", "late", "doubt")),
    *(struck(CHUNKED, fault) for fault in ("crash", "repeat", "leave")),
    struck(CHUNKED, "break", 2),
    TWO_WINDOWS,
    *(struck(WINDOW, fault) for fault in ("break", "leave")),
    *(struck(WINDOW_AT_ONCE, fault) for fault in ("crash", "cut")),
    struck(WINDOW_MOVED, "cut"),
    TWO_STATES,
    struck(STATES, "leave"),
    *(struck(STATES_AT_ONCE, fault) for fault in ("crash", "cut")),
    *(struck(STATES_MOVED, fault) for fault in ("crash", "cut")),
    struck(LEASE_ALONE, "late"),
    *(struck(LAYERS, fault) for fault in ("crash", "repeat", "leave", "cut", "starve")),
    *(struck(MOVED, fault) for fault in ("late", "deaf")),
    replace(struck(ONE, "drain", 2), name="a drain and a crash", faults=("drain", "crash")),
]
"""Worlds that are exhausted in minutes."""
HUGE = [
    struck(TWO_LEASE_ALONE, "starve_read"),
    replace(struck(ONE, "crash"), name="two prefill workers; crash", num_prefill=2),
    replace(TWO, name="two requests that share a prefix", caches_prefixes=True, shares_prompt=True),
    struck(MOVED, "doubt"),
    struck(LEFT_WHILE_MOVED, "crash"),
    struck(MOVED_ON, "silence"),
    *(struck(WINDOW, fault) for fault in ("cut", "crash")),
    struck(WINDOW_LEASE_ALONE, "late"),
    replace(
        TWO_WINDOWS, name=f"{TWO_WINDOWS.name}, a shared prefix", caches_prefixes=True, shares_prompt=True
    ),
    STATES_CACHED,
    struck(STATES_LEASE_ALONE, "late"),
]
"""Worlds that are explored as far as ``MAX_WORLDS``, nearest first."""
MAX_WORLDS = 300_000
HUGE += [
    replace(struck(ONE, "drain"), name="two prefill workers; drain", num_prefill=2),
    struck(ONE, "drain", 2),
]
DRAINED = replace(struck(ONE, "drain"), max_replays=0)
DRAINS = [
    DRAINED,
    replace(DRAINED, name="one request, published block by block; drain", prefill_chunk=2),
    replace(DRAINED, name="one-sided reads without digests; drain", is_one_sided=True, checks_digests=False),
]
"""A worker drains at any moment, its deadline passes at any moment, and it is started again when it has left.

max_replays: a single failure would end the request.
"""
LARGE_DRAINS = [replace(DRAINED, name="two decode workers; drain", num_decode=2)]
"""The same, exhausted in a minute."""
LADDER = replace(
    struck(ONE, "sever", 2),
    name="two prefill workers, two severed ways to read",
    num_prefill=2,
    max_replays=2,
)
"""Two hand-overs of the same request may fail, each behind its last rung."""
RUNGS = replace(struck(CHUNKED, "sever", 2), name="two transports that may be severed", num_transports=2)
HEALED = [struck(each, "break", 2) for each in (ONE, replace(CHUNKED, num_transports=2))]
"""A read breaks, and the one that was to heal it may too."""
WALKED = [
    Scenario(
        f"two workers of each role, three requests that share a prefix{how}",
        prompts=(3, 4, 1),
        answers=(3, 2, 1),
        num_prefill=2,
        num_decode=2,
        prefill_blocks=4,
        decode_blocks=4,
        caches_prefixes=True,
        shares_prompt=True,
        is_one_sided=is_one_sided,
        num_transports=2,
        num_layer_groups=2,
        window=window,
        window_blocks=4,
        num_slots=num_slots,
        faults=ALL_FAULTS,
        num_faults=4,
    )
    for how, is_one_sided, window, num_slots in (
        ("", False, None, 0),
        ("; one-sided reads", True, None, 0),
        ("; a layer with a window", False, 3, 0),
        ("; a layer with a window, a recurrent layer", False, 3, 2),
    )
]
"""Worlds that are too large to exhaust: walked at random."""
WALKED_WITH_MOVES = [
    replace(
        each,
        name=f"{each.name}; moved while they are decoded",
        answers=(9, 8, 7),
        prefill_blocks=18,
        decode_blocks=8,
        window_blocks=18,
        num_slots=3 * each.num_slots,
        num_moves=1,
        decode_credit=2,
        num_faults=2,
    )
    for each in WALKED
]
"""These worlds move answers at any moment, and each target has room for few of them."""
