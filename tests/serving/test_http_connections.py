"""The list of connections with random clients."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serving.http_connections import EVICTION_AGE_SECONDS, Connections, address_of


class Peer:
    """A connection whose client is controlled by the test."""

    def __init__(self) -> None:
        self.is_waiting = True
        self.is_aborted = False

    def abort(self) -> None:
        """Record that it was closed."""
        self.is_aborted = True


class World:
    """The list, its clock, and its expected content."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self.now = 0.0
        self.book = Connections(max_connections, max_per_address, lambda: self.now)
        self.max = max_connections
        self.max_per_address = max_per_address
        self.open: dict[Peer, str] = {}

    def arrive(self, address: str) -> bool:
        """Add another client; return whether it was accepted."""
        if not self.book.make_room() or not self.book.admits(address):
            self._drop_aborted()
            return False
        peer = Peer()
        self.book.add(peer, address)
        self.open[peer] = address
        self._drop_aborted()
        return True

    def _drop_aborted(self) -> None:
        for peer in [peer for peer in self.open if peer.is_aborted]:
            assert peer.is_waiting, "a busy connection was closed"
            del self.open[peer]

    def check(self) -> None:
        """The list has the expected content, within its limits."""
        self.book.check_integrity()
        assert len(self.book) == len(self.open) <= self.max
        for address in set(self.open.values()):
            assert list(self.open.values()).count(address) <= self.max_per_address


ACTIONS = st.tuples(
    st.sampled_from(["arrive", "work", "wait", "leave", "pass"]), st.integers(0, 30), st.sampled_from("abc")
)


@given(st.lists(ACTIONS, max_size=60), st.integers(1, 6), st.integers(1, 4))
def test_no_limit_is_passed_and_no_busy_connection_is_closed(
    actions: list[tuple[str, int, str]], max_connections: int, max_per_address: int
) -> None:
    """H7: for all behaviours of clients the limits hold, and waiting connections never block a new one for long."""
    world = World(max_connections, max_per_address)
    for action, number, address in actions:
        peers = list(world.open)
        peer = peers[number % len(peers)] if peers else None
        if action == "arrive":
            world.arrive(address)
        elif action == "pass":
            world.now += EVICTION_AGE_SECONDS
        elif peer is not None and action == "work":
            peer.is_waiting = False
            world.book.work(peer)
        elif peer is not None and action == "wait":
            peer.is_waiting = True
            world.book.wait(peer)
        elif peer is not None:
            world.book.remove(peer)
            del world.open[peer]
        world.check()
    world.now += EVICTION_AGE_SECONDS
    of_address = [peer for peer, address in world.open.items() if address == "a"]
    all_busy = all(not peer.is_waiting for peer in world.open)
    address_busy = len(of_address) == max_per_address and all(not peer.is_waiting for peer in of_address)
    if not all_busy and not address_busy:
        assert world.arrive("a")
        world.check()


def test_a_young_connection_is_not_closed_for_a_newer_one() -> None:
    """P2: a burst of normal clients does not evict itself: each has time to send."""
    world = World(1, 1)
    assert world.arrive("a")
    assert not world.arrive("a")
    world.now += EVICTION_AGE_SECONDS
    assert world.arrive("a")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (("10.1.2.3", 80), "10.1.2.3"),
        (("::ffff:10.1.2.3", 80, 0, 0), "10.1.2.3"),
        (("2001:db8::1", 80, 0, 0), "2001:db8::/64"),
        (("fe80::1%eth0", 80, 0, 2), "fe80::/64"),
        ("", ""),
    ],
)
def test_an_ipv6_network_counts_as_one_address(name: tuple[object, ...] | str, wanted: str) -> None:
    assert address_of(name) == wanted
