"""The actions that are possible: of a worker or a link by itself, and of each fault."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.protocol.decode_side import DecodeSide, sender_of
from tests.protocol.link import Link
from tests.protocol.prefill_side import PrefillSide
from tests.protocol.reads import look_at_reads
from tests.protocol.world import Action, World

if TYPE_CHECKING:
    from tests.protocol.world_rules import WorldRules


def look(side: PrefillSide | DecodeSide) -> tuple[Action, ...]:
    """The actions of a worker by itself, without its place in the world."""
    actions: list[Action] = [("step",)] if side.needs_step else []
    if isinstance(side, PrefillSide):
        return (*actions, ("digest",)) if side.orders else tuple(actions)
    actions += [("commit",)] if side.commits else []
    return (*actions, *(("read", peer) for peer, _ in look_at_reads(side)))


def link_actions(index: int, link: Link) -> Iterator[Action]:
    """Return the actions that are possible on a control link."""
    if link.is_cut or not link.is_up:
        if link.knows_prefill:
            yield "notice", index, True
        if link.knows_decode:
            yield ("notice", index, False) if link.is_cut else ("connect", index)
        return
    if link.to_prefill:
        yield "to_prefill", index
    if link.to_decode:
        yield "to_decode", index


def _living(rules: "WorldRules", world: World, is_prefill: bool) -> Iterator[tuple[int]]:
    return (
        (index,)
        for index, one in enumerate(world.workers)
        if one.state is not None and one.is_prefill == is_prefill
    )


def _attached(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    return ((i,) for i, one in enumerate(world.workers) if one.state is not None and one.is_attached)


def _corruptible(rules: "WorldRules", world: World) -> Iterator[tuple[int, str]]:
    for (index,) in _living(rules, world, False):
        side = rules.decodes.states[world.workers[index].state or 0]
        yield from ((index, peer) for peer, reading in look_at_reads(side) if reading.stage == "copying")


def _breakable(rules: "WorldRules", world: World) -> Iterator[tuple[int, str]]:
    for (index,) in _living(rules, world, False):
        side = rules.decodes.states[world.workers[index].state or 0]
        running = ((lane, reading) for lane, reading in look_at_reads(side) if reading.stage != "landed")
        yield from ((index, lane) for lane, reading in running if not reading.read.is_stopped)


def _severable(rules: "WorldRules", world: World) -> Iterator[tuple[int, str]]:
    """Return the lanes that can be severed: before the first byte of a read. After it, "break" may happen."""
    for (index,) in _living(rules, world, False):
        side = rules.decodes.states[world.workers[index].state or 0]
        posted = (lane for lane, reading in look_at_reads(side) if reading.stage == "posted")
        yield from ((index, lane) for lane in posted if lane not in side.severed)


def _being_read(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    """Return the prefill workers whose blocks are crossing now."""
    for (index,) in _living(rules, world, False):
        side = rules.decodes.states[world.workers[index].state or 0]
        readings = [(peer, reading) for peer, reading in look_at_reads(side) if reading.source_blocks]
        places = (
            rules.find(world, sender_of(peer)) for peer, reading in readings if reading.stage != "landed"
        )
        yield from ((place,) for place in places if place is not None)


def _digesting(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    for (index,) in _living(rules, world, True):
        if rules.prefills.states[world.workers[index].state or 0].orders:
            yield (index,)


def _drainable(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    router = rules.routers.states[world.router]
    for (index,) in _attached(rules, world):
        worker = world.workers[index]
        if router.workers.get(worker.name) == worker.boot and worker.name not in router.draining:
            yield (index,)


def _uncut(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    return ((index,) for index, link in enumerate(world.links) if not link.is_cut and link.is_up)


def _busy(rules: "WorldRules", world: World) -> Iterator[tuple[int, bool]]:
    for index, link in enumerate(world.links):
        if link.is_up and link.to_prefill:
            yield index, True
        if link.is_up and link.to_decode:
            yield index, False


def _unended(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    return ((one.number,) for one in rules.routers.states[world.router].requests if not one.ended)


def _silent(rules: "WorldRules", world: World) -> Iterator[tuple[int]]:
    return ((number,) for number in rules.routers.states[world.router].silent_targets())


PLACES: dict[str, Callable[["WorldRules", World], Iterator[tuple[Any, ...]]]] = {
    "crash": lambda rules, world: ((i,) for i, one in enumerate(world.workers) if one.state is not None),
    "deaf": _attached,
    "drain": _drainable,
    "cut": _uncut,
    "repeat": _busy,
    "delay": _busy,
    "corrupt": _corruptible,
    "break": _breakable,
    "sever": _severable,
    "spoil": _digesting,
    "starve": lambda rules, world: _living(rules, world, True),
    "starve_read": _being_read,
    "late": lambda rules, world: _living(rules, world, False),
    "doubt": _unended,
    "silence": _silent,
    "leave": _unended,
}
