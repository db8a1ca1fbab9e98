"""One prompt whose KV is lent, as ``SendTransfers`` keeps it, and what is remembered of those that ended."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ErrorKind, InternalError
from contract.requests import EngineRequest
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import LeaseName, RangeGrant, grants_within
from kv_transfer.protocol.states import Ending, Send, SendState

TransferKey = tuple[str, int]
"""The transfer id and the attempt, by which the receiver's messages name a transfer."""
_MAX_REMEMBERED = 4096


@dataclass
class OutgoingTransfer:
    """One transfer, with the data that the state machine does not need.

    key: the engine's request key; None while a fetch is parked. num_wanted: blocks to order at the next step. grants: of the
    published ranges, in order. other_digests: of the ranks from 1 on; the state machine has those of rank 0.
    """

    transfer_id: str
    attempt: int
    send: Send
    since: float
    key: str | None = None
    lease: str = ""
    block_ids: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_wanted: int = 0
    grants: list[RangeGrant] = field(default_factory=list)
    other_digests: list[list[int]] = field(default_factory=list)

    @property
    def wire_key(self) -> TransferKey:
        """See ``TransferKey``."""
        return self.transfer_id, self.attempt

    @property
    def name(self) -> LeaseName:
        """The lease under which the blocks can be read."""
        return LeaseName(self.transfer_id, self.attempt, self.lease)

    @property
    def has_order(self) -> bool:
        """True when blocks wait for the next step's orders."""
        return self.num_wanted > self.send.num_ordered and not self.send.has_ended

    def lend(self, request: EngineRequest, lease: str, block_ids: list[int], seeds: list[int]) -> None:
        """Open the transfer: lend the whole prompt's blocks, whose digests start from ``seeds``."""
        self.key = request.key
        self.lease = lease
        self.block_ids = list(block_ids)
        self.seeds = seeds
        self.num_tokens = len(request.prompt_token_ids)

    def want(self, num_tokens: int, block_size: int) -> None:
        """Order what the first ``num_tokens`` tokens complete: full blocks, and all of them at the prompt's end."""
        num_blocks = len(self.block_ids) if num_tokens >= self.num_tokens else num_tokens // block_size
        self.num_wanted = max(self.num_wanted, num_blocks)

    def order(self, num_parts: int, *, tells_end: bool) -> PublishOrder:
        """Return the order for the wanted blocks. Only for a transfer that has one."""
        if self.key is None:
            raise InternalError(f"transfer {self.transfer_id} is ordered before it is open")
        first = self.send.num_ordered
        blocks = self.block_ids[first : self.num_wanted]
        seeds = self.seeds[first : self.num_wanted]
        return PublishOrder(self.key, self.name, first, blocks, seeds, num_parts, tells_end)

    def note_range(self, ready: ev.RangeReady) -> None:
        """Keep a range's grants, and the digests of the ranks from 1 on."""
        first = ready.first_block
        num_blocks = len(ready.digests)
        for rank, grants in enumerate((ready.grants, *(other.grants for other in ready.others))):
            if grants:
                self.grants.append(RangeGrant(first, num_blocks, dict(grants), rank))
        self.other_digests = self.other_digests or [[] for _ in ready.others]
        for known, other in zip(self.other_digests, ready.others, strict=True):
            known.extend(other.digests)

    def note_layers(self, ready: ev.LayersReady) -> None:
        """Keep the grants: they are not repeated when the range is whole."""
        if ready.grants:
            self.grants.append(RangeGrant(ready.first_block, ready.num_blocks, dict(ready.grants)))

    def message_of(
        self,
        action: ev.Announce
        | ev.AnnounceStart
        | ev.AnnounceLayers
        | ev.AnnounceEnd
        | ev.AnnounceComplete
        | ev.Refuse,
    ) -> msg.Message:
        """Return the message to the peer that this action stands for."""
        wire = self.wire_key
        match action:
            case ev.Announce(first, digests):
                end = first + len(digests)
                grants = grants_within(self.grants, first, end)
                others = [other[first:end] for other in self.other_digests]
                return msg.BlocksPublished(*wire, self.lease, first, list(digests), grants, others)
            case ev.AnnounceStart():
                return msg.PromptStarted(*wire, self.lease)
            case ev.AnnounceLayers(first, num_blocks, num_bytes):
                grants = grants_within(self.grants, first, first + num_blocks)
                return msg.LayersReadable(*wire, self.lease, first, num_blocks, num_bytes, grants)
            case ev.AnnounceEnd():
                return msg.EndExpected(*wire, self.lease, action.seconds)
            case ev.AnnounceComplete():
                return msg.TransferComplete(*wire, self.send.num_blocks, list(action.first_tokens))
            case ev.Refuse():
                return msg.TransferFailed(*wire, action.kind, action.message)

    def debug_state(self, now: float) -> dict[str, Any]:
        """Return the transfer as plain data."""
        return {
            "transfer_id": self.transfer_id,
            "attempt": self.attempt,
            "request": self.key,
            "state": str(self.send.state),
            "age_seconds": now - self.since,
            "num_blocks": self.send.num_blocks,
            "num_published": len(self.send.digests),
            "peer": self.send.peer,
        }


class OutgoingTransfers:
    """Owns the sender's transfers, and what is remembered of those that ended. Not thread-safe.

    Only the newest attempt of the latest 4096 transfers is remembered, and the endings of the latest 4096 attempts.
    """

    def __init__(self) -> None:
        self._by_wire_key: dict[TransferKey, OutgoingTransfer] = {}
        self._by_key: dict[str, OutgoingTransfer] = {}
        self._newest = OrderedDict[str, int]()
        self._endings = OrderedDict[TransferKey, Ending]()

    def __iter__(self) -> Iterator[OutgoingTransfer]:
        """Iterate over a copy of all transfers, parked ones included."""
        return iter(list(self._by_wire_key.values()))

    def get(self, wire_key: TransferKey) -> OutgoingTransfer | None:
        """Return a transfer by the name that the receiver uses."""
        return self._by_wire_key.get(wire_key)

    def get_by_key(self, key: str) -> OutgoingTransfer | None:
        """Return a transfer by its request's key."""
        return self._by_key.get(key)

    def find(self, key: str) -> OutgoingTransfer:
        """Return a transfer by its request's key. Raises InternalError for an unknown one."""
        outgoing = self._by_key.get(key)
        if outgoing is None:
            raise InternalError(f"request {key} lends nothing")
        return outgoing

    def opened(self) -> list[OutgoingTransfer]:
        """Return the transfers that the scheduler has opened, oldest first."""
        return list(self._by_key.values())

    def add(self, outgoing: OutgoingTransfer) -> None:
        """Add a transfer that is opened or parked, or note that a parked one was opened."""
        wire_key = outgoing.wire_key
        self._by_wire_key[wire_key] = outgoing
        if outgoing.key is not None:
            self._by_key[outgoing.key] = outgoing
        self._endings.pop(wire_key, None)
        (transfer_id, attempt) = wire_key
        self._newest[transfer_id] = max(attempt, self._newest.pop(transfer_id, attempt))
        while len(self._newest) > _MAX_REMEMBERED:
            self._newest.popitem(last=False)

    def forget(self, outgoing: OutgoingTransfer) -> None:
        """Remove a transfer, and remember how it ended."""
        self._by_wire_key.pop(outgoing.wire_key, None)
        if outgoing.key is not None:
            self._by_key.pop(outgoing.key, None)
        if outgoing.send.ending is not None:
            self._endings[outgoing.wire_key] = outgoing.send.ending
        while len(self._endings) > _MAX_REMEMBERED:
            self._endings.popitem(last=False)

    def refusal_of(self, wire_key: TransferKey) -> Ending | None:
        """Return why a fetch must be refused: a newer attempt is known, or this one has ended."""
        (transfer_id, attempt) = wire_key
        newest = self._newest.get(transfer_id, attempt)
        if attempt < newest:
            text = f"attempt {attempt} of transfer {transfer_id} is older than attempt {newest}, which is known here"
            return Ending(ErrorKind.TRANSFER_FAILED, text)
        return self._endings.get(wire_key)

    def num_parked(self, peer: str) -> int:
        """Return how many fetches of a peer are parked."""
        return sum(one.send.state is SendState.PARKED and one.send.peer == peer for one in self)

    def next_deadline(self) -> float | None:
        """Return when the next lease or parked fetch expires."""
        deadlines = [one.send.deadline for one in self if one.send.deadline is not None]
        return min(deadlines, default=None)

    def gauges(self) -> dict[str, float]:
        """Return the numbers of active leases and parked fetches."""
        return {
            "leases_active": sum(not one.send.has_ended for one in self._by_key.values()),
            "transfers_parked": sum(one.send.state is SendState.PARKED for one in self),
        }
