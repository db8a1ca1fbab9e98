"""A read of the explored world: lease, bytes of each block, lease again, digests; each is an action."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.protocol.decode_side import DecodeSide, Reading, sender_of

if TYPE_CHECKING:
    from tests.protocol.link_rules import LinkRules


def look_at_reads(side: DecodeSide) -> Iterator[tuple[str, Reading]]:
    """Return the next read of each lane."""
    return ((name, lane[0]) for name, lane in side.lanes.items() if lane)


def advance_read(rules: "LinkRules[Any]", world: Any, index: int, lane: str, *, is_corrupt: bool) -> Any:
    """Advance the first read of ``lane`` by one stage."""
    state = world.workers[index].state
    assert state is not None
    reading = rules.decodes.states[state].lanes[lane][0]
    source = rules.find(world, sender_of(lane))
    is_counted = not rules.scenario.is_one_sided
    if reading.stage == "landed":
        return rules.call(world, index, "verify", lane)
    ends_now = reading.stage != "copying" or is_counted
    if reading.read.is_stopped and ends_now:
        if is_counted and reading.stage != "posted" and source is not None:
            world = rules.call(world, source, "end_read", reading.name)
        return rules.call(world, index, "end", lane, "stopped")
    if source is None:
        return rules.call(world, index, "end", lane, "the sender is gone")
    if lane in rules.decodes.states[state].severed:
        return break_read(rules, world, index, lane)
    if reading.stage == "posted":
        world, lent = rules.ask(world, source, "begin_read", reading.request)
        if lent is None:
            return rules.call(world, index, "end", lane, "the lease is over")
        return rules.call(world, index, "begin", lane, *lent)
    if reading.stage == "copying":
        state = world.workers[source].state
        assert state is not None
        contents = rules.prefills.states[state].contents[reading.source_group]
        content = contents.get(reading.source_blocks[reading.num_copied])
        return rules.call(world, index, "take_block", lane, None if is_corrupt else content)
    return _end_of_bytes(rules, world, index, source, lane, reading)


def break_read(rules: "LinkRules[Any]", world: Any, index: int, lane: str) -> Any:
    """Break the connection of the lane's first read; the next one may work."""
    reading = rules.decodes.states[world.workers[index].state or 0].lanes[lane][0]
    source = rules.find(world, sender_of(lane))
    if not rules.scenario.is_one_sided and reading.stage != "posted" and source is not None:
        world = rules.call(world, source, "end_read", reading.name)
    return rules.call(world, index, "end", lane, "the connection broke")


def _end_of_bytes(
    rules: "LinkRules[Any]", world: Any, index: int, source: int, lane: str, reading: Reading
) -> Any:
    if not rules.scenario.is_one_sided:
        world = rules.call(world, source, "end_read", reading.name)
    if rules.scenario.rules.checks_lease_twice:
        world, is_valid = rules.ask(world, source, "is_valid", reading.name)
        if not is_valid:
            return rules.call(world, index, "end", lane, "the lease is over")
    return rules.call(world, index, "land", lane)
