"""The results of actions between two workers of an explored world: links, reads and deadlines."""

from typing import Any, Generic, TypeVar

from tests.protocol.decode_side import sender_of
from tests.protocol.link import Link
from tests.protocol.machine import Machine
from tests.protocol.reads import advance_read, look_at_reads
from tests.protocol.scenario import Scenario
from tests.protocol.world import remembered, with_item

W = TypeVar("W")


class LinkRules(Generic[W]):
    """The results of these actions in any world W with ``workers`` and ``links``. A subclass owns the machines."""

    scenario: Scenario
    prefills: Machine[Any]
    decodes: Machine[Any]

    def find(self, world: W, boot: str) -> int | None:
        """Return the index of the living worker of this incarnation."""
        raise NotImplementedError

    def ask(self, world: W, index: int, *call: Any) -> tuple[W, Any]:
        """Call a worker; return the world with the messages to others on their way, and the call's result."""
        raise NotImplementedError

    def call(self, world: W, index: int, *call: Any) -> W:
        """Call a worker whose result does not matter."""
        return self.ask(world, index, *call)[0]

    def _step(self, world: Any, index: int) -> W:
        return self.call(world, index, "step")

    def _digest(self, world: Any, index: int) -> W:
        return self.call(world, index, "digest", False)

    def _commit(self, world: Any, index: int) -> W:
        return self.call(world, index, "commit")

    def _read(self, world: Any, index: int, peer: str) -> W:
        after: W = advance_read(self, world, index, peer, is_corrupt=False)
        return after

    def _expire(self, world: Any, index: int) -> W:
        boot = world.workers[index].boot
        living = {
            link.decode for link in world.links if link.prefill == boot and link.is_up and not link.is_cut
        }
        return self.call(world, index, "expire", tuple(sorted(living)))

    def _late(self, world: Any, index: int) -> W:
        return self.call(world, index, "run_out_of_time")

    def _with_links(self, world: Any, links: tuple[Link, ...]) -> W:
        after: W = world._replace(links=links)
        return after

    def _end_readers(self, world: W, reader: Any) -> W:
        if self.scenario.is_one_sided or reader.is_prefill or reader.state is None:
            return world
        for lane, reading in look_at_reads(self.decodes.states[reader.state]):
            place = self.find(world, sender_of(lane))
            if place is not None and reading.stage in ("copying", "copied"):
                world = self.call(world, place, "end_read", reading.name)
        return world

    def _connect(self, world: Any, index: int) -> W:
        link = world.links[index]
        prefill, decode = self.find(world, link.prefill), self.find(world, link.decode)
        assert decode is not None
        if prefill is None:
            world = world._replace(
                links=remembered(with_item(world.links, index, link._replace(knows_decode=False)))
            )
            return self.call(world, decode, "link_down", link.prefill)
        up = link._replace(is_up=True, knows_prefill=True)
        world = self._with_links(world, with_item(world.links, index, up))
        for other in [i for i, one in enumerate(world.links) if i != index and one.knows_prefill]:
            if world.links[other][:2] == link[:2]:
                older = world.links[other]._replace(knows_prefill=False)
                world = self._with_links(world, with_item(world.links, other, older))
                world = self.call(world, prefill, "peer_gone", link.decode)
        world = self.call(world, decode, "link_up", link.prefill)
        return self._with_links(world, remembered(world.links))

    def _to_prefill(self, world: Any, index: int) -> W:
        link = world.links[index]
        world = world._replace(
            links=with_item(world.links, index, link._replace(to_prefill=link.to_prefill[1:]))
        )
        return self._say(world, link.prefill, link.decode, link.to_prefill[0])

    def _to_decode(self, world: Any, index: int) -> W:
        link = world.links[index]
        world = world._replace(
            links=with_item(world.links, index, link._replace(to_decode=link.to_decode[1:]))
        )
        return self._say(world, link.decode, link.prefill, link.to_decode[0])

    def _say(self, world: W, receiver: str, sender: str, frame: bytes) -> W:
        place = self.find(world, receiver)
        return world if place is None else self.call(world, place, "hear", sender, frame)

    def _notice(self, world: Any, index: int, is_prefill: bool) -> W:
        link = world.links[index]
        side, peer = (link.prefill, link.decode) if is_prefill else (link.decode, link.prefill)
        known = link._replace(knows_prefill=False) if is_prefill else link._replace(knows_decode=False)
        world = self._with_links(world, remembered(with_item(world.links, index, known)))
        place = self.find(world, side)
        assert place is not None
        return self.call(world, place, "peer_gone" if is_prefill else "link_down", peer)
