"""The explored world: workers, links, streams and router at one moment. A world is a value."""

from typing import Any, NamedTuple, Protocol

from tests.protocol.link import Link

Action = tuple[Any, ...]


class WorkerState(NamedTuple):
    """One worker. state: of its machine, None while it is dead. is_attached: it has an open stream to the router."""

    name: str
    is_prefill: bool
    num_boots: int = 0
    boot: str = ""
    state: int | None = None
    is_attached: bool = True


class World(NamedTuple):
    """Everything that decides what can happen. limbo: (receiver, sender, frame) of delayed or repeated messages."""

    num_faults: int
    router: int
    workers: tuple[WorkerState, ...]
    links: tuple[Link, ...] = ()
    streams: tuple[tuple[Any, ...], ...] = ()
    limbo: tuple[tuple[str, str, bytes], ...] = ()


def with_item(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """Return ``items`` with another item at ``index``."""
    return (*items[:index], item, *items[index + 1 :])


def remembered(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """Return the links of which a side has not seen the end, sorted."""
    return tuple(sorted(link for link in links if not link.is_forgotten))


def without(link: Link, boot: str) -> Link:
    """Return the link after this incarnation's death."""
    if boot == link.prefill:
        return link.cut()._replace(knows_prefill=False)
    return link.cut()._replace(knows_decode=False) if boot == link.decode else link


class Sender(Protocol):
    """The worker that sends a frame."""

    @property
    def is_prefill(self) -> bool:
        """True for one that lends."""

    @property
    def boot(self) -> str:
        """Its incarnation."""


def posted(
    links: tuple[Link, ...], sender: Sender, is_dial: bool, peer: str, frame: bytes
) -> tuple[Link, ...]:
    """Post a frame of ``sender`` for ``peer``, if there is a link; ``is_dial`` makes one."""
    for index, link in enumerate(links):
        if sender.is_prefill and link.knows_prefill and (link.decode, link.prefill) == (peer, sender.boot):
            if not link.is_cut:
                return with_item(links, index, link._replace(to_decode=(*link.to_decode, frame)))
        elif (
            not sender.is_prefill and link.knows_decode and (link.decode, link.prefill) == (sender.boot, peer)
        ):
            return (
                links
                if link.is_cut
                else with_item(links, index, link._replace(to_prefill=(*link.to_prefill, frame)))
            )
    return tuple(sorted((*links, Link(sender.boot, peer, (frame,))))) if is_dial else links
