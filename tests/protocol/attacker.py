"""An attacker on the wire of the workers' handshake: it holds everything but the cluster secret.

The honest sides are production's own (``Dialing``, ``Accepting``). The attacker receives every message instead of the other
side. To any side it may deliver any message: an observed one (drops, replays, reflections, another order, another session),
and forgeries: an observed one with a field taken from elsewhere, or with the border between two fields moved.
Honest sides may be run as often as it likes, and from any earlier state again. This is the model of Dolev and Yao, with
forgeries of a bounded depth; what it finds is an attack, and what it does not find is no proof of absence.

A side that opens a session must agree with one honest side about every field of every message so far (Lowe's agreement);
else ``find_attack`` returns what was believed.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import KvbatonError
from contract.identity import Role
from kv_transfer.protocol.handshake import Accepting, Dialing, LocalIdentity, PeerTarget
from kv_transfer.protocol.messages import Challenge, Hello, Mac, Message, Offer, Prove, Welcome, mac_of
from tests.kv_transfer.builders import LAYOUT, identity_for

_EVIL: dict[str, tuple[Any, ...]] = {
    "nonce": ("evil",),
    "worker_id": ("evil", "p", "q", "d/1"),
    "boot_id": ("evil", "boot-p", "boot-q", "boot-d"),
    "role": ("both", "router"),
    "target_worker_id": ("p", "q"),
    "target_boot_id": ("boot-p", "boot-q"),
    "protocol_min": (1,),
    "protocol_max": (99,),
    "protocol": (7,),
    "model_fingerprint": ("model-fingerprint@bfloat16",),
    "layout": (replace(LAYOUT, block_size=2 * LAYOUT.block_size),),
    "transports": (["tcp", "evil"],),
    "offers": ([Offer("tcp", "evil:1")],),
    "timeout_seconds": (999.0,),
    "num_ranks": (2,),
}
_NEXT: dict[tuple[type, int], type[Message]] = {
    (Accepting, 0): Hello,
    (Dialing, 1): Challenge,
    (Accepting, 2): Prove,
    (Dialing, 3): Welcome,
}
"""The message that a side takes next, by how many messages it has sent and received."""
_MAX_ROUNDS = 6


def identity_of(worker_id: str, boot_id: str, role: str) -> LocalIdentity:
    return identity_for(worker_id, Role(role), offers=[Offer("tcp", f"{worker_id}:9")], boot_id=boot_id)


@dataclass(frozen=True)
class Side:
    """An honest side in some state, and what it has sent and received."""

    who: LocalIdentity
    half: Dialing | Accepting
    log: tuple[Message, ...] = ()

    def given(self, message: Message) -> "Side | None":
        """Return its next state after this message, None if it refuses the message."""
        half = copy.deepcopy(self.half, {id(self.who): self.who})
        try:
            replies = half.receive(message)
        except KvbatonError:
            return None
        return Side(self.who, half, (*self.log, message, *replies))


@dataclass(frozen=True)
class Attack:
    """A session that an honest side has opened although no honest side opened it from the other end."""

    victim: Side
    believed: tuple[Message, ...]

    def __str__(self) -> str:
        victim = self.victim.who.settings.worker_id
        return "\n".join([f"{victim} believes in {self.victim.half.session}", *map(str, self.believed)])


class Attacker:
    """Owns the honest sides' states and the messages that it has seen. mac: the MAC of the honest sides."""

    def __init__(self, mac: Mac = mac_of) -> None:
        d = identity_of("d/1", "boot-d", "decode")
        p = identity_of("p", "boot-p", "prefill")
        q = identity_of("q", "boot-q", "prefill")
        self.sides = [Side(each, Accepting(each, mac)) for each in (p, q, d)]
        self._known: dict[bytes, Message] = {}
        self.num_deliveries = 0
        for target in (p, p, q):
            dialing = Dialing(
                d, PeerTarget(target.settings.worker_id, target.settings.boot_id, "127.0.0.1:1"), mac
            )
            self.sides.append(Side(d, dialing, tuple(self._seen(dialing.begin()))))
        self.completed: list[Side] = []

    def find_attack(self) -> Attack | None:
        """Deliver until nothing new happens, or a side accepts what no honest side has sent."""
        tried: set[tuple[int, bytes]] = set()
        for _ in range(_MAX_ROUNDS):
            before = len(self.sides)
            for number, side in enumerate(list(self.sides)):
                for message in list(self._deliverable(side)):
                    key = (number, msgspec.msgpack.encode(message))
                    if key in tried:
                        continue
                    tried.add(key)
                    if attack := self._deliver(side, message):
                        return attack
            if len(self.sides) == before:
                break
        return None

    def strings(self) -> set[str]:
        """Return every text that it has seen, of whatever field."""
        return {
            value
            for message in self._known.values()
            for value in msgspec.structs.astuple(message)
            if isinstance(value, str)
        }

    def _deliver(self, side: Side, message: Message) -> Attack | None:
        self.num_deliveries += 1
        then = side.given(message)
        if then is None:
            return None
        self.sides.append(then)
        self._seen(then.log[len(side.log) + 1 :])
        if then.half.session is None:
            return None
        self.completed.append(then)
        return None if self._is_agreed(then) else Attack(then, then.log)

    def _is_agreed(self, side: Side) -> bool:
        """Return whether an honest side of the other kind has sent and received exactly these messages."""
        session = side.half.session
        other = Accepting if isinstance(side.half, Dialing) else Dialing
        peers = [
            peer
            for peer in self.sides
            if isinstance(peer.half, other)
            and peer.log
            and _unproved(peer.log) == _unproved(side.log)[: len(peer.log)]
            and len(peer.log) >= 3
        ]
        named = [
            peer
            for peer in peers
            if session is not None
            and (session.worker_id, session.boot_id, session.role)
            == (peer.who.settings.worker_id, peer.who.settings.boot_id, peer.who.settings.role)
        ]
        if isinstance(side.half, Dialing):
            return any(
                len(peer.log) == len(side.log)
                and session is not None
                and list(session.offers) == peer.who.offers()
                and peer.half.session is not None
                and peer.half.session.token == session.token
                for peer in named
            )
        return bool(named)

    def _seen(self, messages: Sequence[Message]) -> Sequence[Message]:
        for message in messages:
            self._known[msgspec.msgpack.encode(message)] = message
        return messages

    def _deliverable(self, side: Side) -> Iterator[Message]:
        wanted = _NEXT.get((type(side.half), len(side.log)))
        for known in list(self._known.values()):
            yield known  # also where another one is due: in any order, and back to its sender
            if type(known) is wanted:
                yield from _forged(known)


def _forged(known: Message) -> Iterator[Message]:
    """Yield the message with one field of another value, or with a border between two fields moved."""
    fields = known.__struct_fields__
    for name in fields:
        for value in _EVIL.get(name, ()):
            if value != getattr(known, name):
                yield replace(known, **{name: value})
    for first, second in pairwise(fields):
        ours, theirs = getattr(known, first), getattr(known, second)
        if isinstance(ours, str) and isinstance(theirs, str):
            for moved in _moved(ours, theirs):
                yield replace(known, **dict(zip((first, second), moved, strict=True)))


def _moved(first: str, second: str) -> Iterator[tuple[str, str]]:
    """Yield other ways to cut the two texts, with nothing or a separator between them."""
    yield first + second[:1], second[1:]
    head, separator, tail = first.partition("/")
    if separator:
        yield head, f"{tail}/{second}"


def _unproved(log: Sequence[Message]) -> list[Message]:
    return [replace(each, proof="") if hasattr(each, "proof") else each for each in log]
