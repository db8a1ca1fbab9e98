"""One prompt whose KV is lent, as ``SendTransfers`` keeps it, and the history of attempts."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ErrorKind, InternalError
from contract.requests import EngineRequest
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol import send_side
from kv_transfer.protocol.events import EndReason
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.reads import LeaseName, RangeGrant, grants_within
from kv_transfer.protocol.send_side import Send, SendState, SendStep
from kv_transfer.settings import LocalWorker, TransferSettings

TransferKey = tuple[str, int]
"""The transfer id and the attempt, by which the receiver's messages name a transfer."""
_MAX_REMEMBERED = 4096


@dataclass
class OutgoingTransfer:
    """One transfer, with the data that the state machine does not need.

    key: the engine's request key; None while a fetch is parked. num_computed: tokens whose KV was there when the transfer
    was opened. num_requested: blocks that the next step is to order. num_opened: blocks that were lent then; those of groups
    of layers with a window, and the states, follow when the whole prompt is computed. ends: the number behind the last block
    of each group. grants: of the published ranges, in order. other_digests: of the ranks from 1 on; the state machine has
    rank 0's.
    """

    transfer_id: str
    attempt: int
    send: Send
    since: float
    key: str | None = None
    lease: str = ""
    block_ids: list[int] = field(default_factory=list)
    num_opened: int = 0
    seeds: list[int] = field(default_factory=list)
    ends: tuple[int, ...] = ()
    num_tokens: int = 0
    num_computed: int = 0
    num_requested: int = 0
    grants: list[RangeGrant] = field(default_factory=list)
    other_digests: list[list[int]] = field(default_factory=list)

    @classmethod
    def parked(
        cls, peer: str, message: msg.FetchBlocks, settings: TransferSettings, now: float
    ) -> "OutgoingTransfer":
        """Return a transfer that is fetched before it is opened."""
        send = Send(
            state=SendState.PARKED,
            lease_seconds=settings.lease_seconds,
            is_opened=False,
            peer=peer,
            from_block=message.from_block,
            deadline=now + settings.parked_seconds,
        )
        return cls(message.transfer_id, message.attempt, send, now)

    @property
    def wire_key(self) -> TransferKey:
        """See ``TransferKey``."""
        return self.transfer_id, self.attempt

    @property
    def name(self) -> LeaseName:
        """The lease under which the blocks can be read."""
        return LeaseName(self.transfer_id, self.attempt, self.lease)

    @property
    def num_to_order(self) -> int:
        """Number of blocks that wait for the next step's orders."""
        return 0 if self.send.has_ended else max(0, self.num_requested - self.send.num_ordered)

    def lend(
        self,
        request: EngineRequest,
        lease: str,
        block_ids: list[int],
        seeds: list[int],
        ends: tuple[int, ...],
        num_computed: int,
    ) -> None:
        """Open the transfer: lend the whole prompt's blocks, whose digests start from ``seeds``."""
        self.key = request.key
        self.lease = lease
        self.block_ids = list(block_ids)
        self.num_opened = len(block_ids)
        self.seeds = seeds
        self.ends = ends
        self.num_tokens = len(request.prompt_token_ids)
        self.num_computed = num_computed

    def request_blocks(self, num_tokens: int, block_size: int, last: Sequence[Sequence[int]] = ()) -> None:
        """Request the blocks that ``num_tokens`` tokens fill; the last one too at the prompt's end, and ``last``.

        Raises InternalError if these are not all blocks that are handed over.
        """
        for block_ids in last:
            self.block_ids += block_ids
        if num_tokens >= self.num_tokens and len(self.block_ids) != len(self.seeds):
            raise InternalError(
                f"{len(self.block_ids)} blocks are lent for {self.key}; its transfer has {len(self.seeds)}"
            )
        self.num_requested = max(self.num_requested, self._blocks_of(num_tokens, block_size))

    def order(self, worker: LocalWorker) -> PublishOrder:
        """Return the order for the blocks that wait for one, as far as they are of one group.

        Only the prompt's last range is split into parts: its receiver waits for it, while others are read during later
        steps.
        """
        if self.key is None:
            raise InternalError(f"transfer {self.transfer_id} is ordered before it is open")
        first = self.send.num_ordered
        group = bisect_right(self.ends, first)
        end = min(self.num_requested, self.ends[group])
        blocks = self.block_ids[first:end]
        seeds = self.seeds[first:end]
        is_computed = end <= self._blocks_of(self.num_computed, worker.side.layout.block_size)
        is_last = worker.is_single_rank and not is_computed and end == self.send.num_blocks
        # Only the layers of one group are computed in the order in which a block has them.
        is_state = group == worker.side.state_group
        is_split = (
            is_last
            and not is_state
            and len(self.ends) == 1
            and len(blocks) >= worker.settings.min_split_blocks
        )
        num_parts = worker.settings.num_layer_groups if is_split else 1
        return PublishOrder(
            self.key,
            self.name,
            first,
            blocks,
            seeds,
            num_parts,
            announces_end=is_last,
            is_computed=is_computed,
            group=group,
            num_tokens=self.num_tokens if is_state else 0,
        )

    def step_of(self, event: ev.SendEvent) -> SendStep:
        """Return the transfer after a report of the data half, and what to do. Keeps the grants and digests in it."""
        match event:
            case ev.BlockRange():
                for rank, each in enumerate((event, *event.others)):
                    if each.grants:
                        grant = RangeGrant(each.first_block, len(each.digests), dict(each.grants), rank)
                        self.grants.append(grant)
                self.other_digests = self.other_digests or [[] for _ in event.others]
                for known, other in zip(self.other_digests, event.others, strict=True):
                    known.extend(other.digests)
                return send_side.on_blocks_ready(self.send, event)
            case ev.LayerRange(first, num_blocks):
                if event.grants:  # they are not repeated when the range is whole
                    self.grants.append(RangeGrant(first, num_blocks, dict(event.grants)))
                return send_side.on_layers_ready(self.send, event)
            case ev.RangeFailed():
                return send_side.on_range_failed(self.send, event)

    def message_of(self, action: ev.SendAction) -> msg.Message:
        """Return the message to the peer that this action stands for. Raises InternalError if it stands for none."""
        wire = self.wire_key
        match action:
            case ev.BlockRange(first, digests):
                end = first + len(digests)
                grants = grants_within(self.grants, first, end)
                others = [other[first:end] for other in self.other_digests]
                return msg.BlocksPublished(*wire, self.lease, first, list(digests), grants, others)
            case ev.SendNotice.START:
                return msg.PromptStarted(*wire, self.lease)
            case ev.LayerRange(first, num_blocks, num_bytes):
                grants = grants_within(self.grants, first, first + num_blocks)
                return msg.LayersReadable(*wire, self.lease, first, num_blocks, num_bytes, grants)
            case ev.SendNotice.COMPLETE if self.send.first_tokens is not None:
                return msg.TransferComplete(*wire, self.send.num_blocks, list(self.send.first_tokens))
            case ev.Refuse():
                return msg.TransferFailed(*wire, action.kind, action.message)
            case _:
                raise InternalError(f"{action} stands for no message")

    def _blocks_of(self, num_tokens: int, block_size: int) -> int:
        if num_tokens >= self.num_tokens:
            return len(self.seeds)
        return min(num_tokens // block_size, self.num_opened)

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


class AttemptHistory:
    """The newest attempt of each transfer, and how it ended if it did; of the latest 4096 transfers. Not thread-safe."""

    def __init__(self) -> None:
        self._newest = OrderedDict[str, tuple[int, EndReason | None]]()

    def record(self, wire_key: TransferKey, ending: EndReason | None = None) -> None:
        """Record that an attempt is opened or parked, or why it ended."""
        (transfer_id, attempt) = wire_key
        newest = self._newest.pop(transfer_id, (attempt, None))
        self._newest[transfer_id] = newest if newest[0] > attempt else (attempt, ending)
        if len(self._newest) > _MAX_REMEMBERED:
            self._newest.popitem(last=False)

    def refusal_of(self, wire_key: TransferKey) -> EndReason | None:
        """Return why a fetch must be refused: a newer attempt is known, or this one has ended."""
        (transfer_id, attempt) = wire_key
        newest, ending = self._newest.get(transfer_id, (attempt, None))
        if attempt < newest:
            text = f"attempt {attempt} of transfer {transfer_id} is older than attempt {newest}, which is known here"
            return EndReason(ErrorKind.TRANSFER_FAILED, text)
        return ending if attempt == newest else None
