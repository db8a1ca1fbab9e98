"""One prompt whose KV is lent, as ``SendTransfers`` keeps it."""

from dataclasses import dataclass, field

from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.reads import LeaseName, RangeGrant, grants_within
from kv_transfer.protocol.send_side import Send

TransferKey = tuple[str, int]
"""How the receiver's words name it."""


@dataclass
class OutgoingTransfer:
    """One transfer with what the pure machine does not need to know.

    num_wanted: blocks to order at the next step. grants: of what is published, in order; empty where nobody hands out any.
    other_digests: of the ranks from 1 on; the machine has rank 0's.
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
    def name(self) -> LeaseName:
        """What may be read."""
        return LeaseName(self.transfer_id, self.attempt, self.lease)

    def note(self, ready: ev.BlockRange) -> None:
        """Keep what the machine does not need of a range."""
        first = ready.first_block
        num_blocks = len(ready.digests)
        for rank, grants in enumerate((ready.grants, *(other.grants for other in ready.others))):
            if grants:
                self.grants.append(RangeGrant(first, num_blocks, dict(grants), rank))
        self.other_digests = self.other_digests or [[] for _ in ready.others]
        for known, other in zip(self.other_digests, ready.others, strict=True):
            known.extend(other.digests)

    def note_layers(self, ready: ev.LayerRange) -> None:
        """Keep the grants, which are not given again when the range is whole."""
        if ready.grants:
            self.grants.append(RangeGrant(ready.first_block, ready.num_blocks, dict(ready.grants)))

    def readable(self, action: ev.LayerRange) -> msg.LayersReadable:
        """The words for the peer."""
        first = action.first_block
        end = action.first_block + action.num_blocks
        return msg.LayersReadable(
            self.transfer_id,
            self.attempt,
            self.lease,
            first,
            action.num_blocks,
            action.num_bytes,
            grants_within(self.grants, first, end),
        )

    def announcement(self, action: ev.BlockRange) -> msg.BlocksPublished:
        """The words for the peer."""
        first = action.first_block
        end = action.first_block + len(action.digests)
        return msg.BlocksPublished(
            self.transfer_id,
            self.attempt,
            self.lease,
            first,
            list(action.digests),
            grants_within(self.grants, first, end),
            [digests[first:end] for digests in self.other_digests],
        )
