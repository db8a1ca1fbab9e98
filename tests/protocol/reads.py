"""A read of the explored world: lease, bytes of each block, lease again, digests; an action each."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.protocol.decode_side import DecodeSide, Reading

if TYPE_CHECKING:
    from tests.protocol.world import World
    from tests.protocol.world_rules import WorldRules


def look_at_reads(side: DecodeSide) -> Iterator[tuple[str, Reading]]:
    """The read that is each lane's turn."""
    return ((peer, lane[0]) for peer, lane in side.lanes.items() if lane)


def advance_read(rules: "WorldRules", world: "World", index: int, peer: str, *, is_corrupt: bool) -> "World":
    """Bring the first read from ``peer`` on by one stage."""
    state = world.workers[index].state
    assert state is not None
    reading = rules.decodes.states[state].lanes[peer][0]
    source = rules.find(world, peer)
    is_counted = not rules.scenario.is_one_sided
    if reading.stage == "landed":
        return rules.call(world, index, "verify", peer)
    ends_now = reading.stage != "copying" or is_counted
    if reading.read.is_stopped and ends_now:
        if is_counted and reading.stage != "posted" and source is not None:
            world = rules.call(world, source, "end_read", reading.name)
        return rules.call(world, index, "end", peer, "stopped")
    if source is None:
        return rules.call(world, index, "end", peer, "the sender is gone")
    if reading.stage == "posted":
        world, blocks = rules.ask(world, source, "begin_read", reading.name, reading.indices)
        if blocks is None:
            return rules.call(world, index, "end", peer, "the lease is over")
        return rules.call(world, index, "begin", peer, blocks)
    if reading.stage == "copying":
        state = world.workers[source].state
        assert state is not None
        content = rules.prefills.states[state].contents.get(reading.source_blocks[reading.num_copied])
        return rules.call(world, index, "take_block", peer, None if is_corrupt else content)
    return _end_of_bytes(rules, world, index, source, peer, reading)


def _end_of_bytes(
    rules: "WorldRules", world: "World", index: int, source: int, peer: str, reading: Reading
) -> "World":
    if not rules.scenario.is_one_sided:
        world = rules.call(world, source, "end_read", reading.name)
    if rules.scenario.rules.checks_lease_twice:
        world, is_valid = rules.ask(world, source, "is_valid", reading.name)
        if not is_valid:
            return rules.call(world, index, "end", peer, "the lease is over")
    return rules.call(world, index, "land", peer)
