"""A prefill worker of the explored world: production's scheduler, ``SendTransfers`` and lease book, moved call by call."""

from dataclasses import dataclass
from typing import cast

import msgspec

from contract.errors import ErrorKind
from engine.connector import KVMemory
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.orders import PublishOrder, TransferMetadata
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.leases import LeaseBook, lent_for
from tests.protocol.engine_side import LAYOUT, LEASE_SECONDS, Connector, EngineSide, no_time
from tests.protocol.frames import frame_of, message_of
from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError, Sink

NUM_PARKED = 4
LENT_BEFORE = 0
"""In place of an order's number of parts, once its blocks can be read."""


@dataclass(frozen=True)
class NoMemory:
    """A pool without blocks: the bytes of a lease are ``contents`` here. regions: those of all groups of layers."""

    group: int = 0
    regions: tuple["NoMemory", ...] = ()
    pool_view: None = None


def ignore() -> None:
    """Ignore the end of a lease: a reader notices it by its second check."""


class PrefillSide(EngineSide):
    """Owns one incarnation of a prefill worker.

    orders: those that the data thread has to digest, in order. num_leases: the number of leases that it ever gave.
    """

    def __init__(self, scenario: Scenario, sink: Sink, boot: str) -> None:
        super().__init__(scenario, sink, boot, scenario.prefill_blocks, scenario.prefill_chunk)
        self.num_leases = 0
        self.orders: list[PublishOrder] = []
        self.book = LeaseBook(lambda name: sink.ask("idle", name))
        regions = tuple(map(NoMemory, range(len(self.contents))))
        self.book.start(cast(KVMemory, NoMemory(regions=regions)))
        self.transfers = scenario.rules.send_transfers(
            self.make_worker(
                max_parked=NUM_PARKED, num_layer_groups=scenario.num_layer_groups, min_split_blocks=1
            ),
            send=lambda ref, message: sink.ask("say", ref.boot_id, frame_of(message)),
            release=lambda name: sink.ask("release", name),
            look_by=lambda _: None,
            clock=no_time,
            new_lease=lambda: sink.new_lease(),
        )
        self.scheduler = self.make_scheduler(scenario.rules.prefill_stages, Connector(self.transfers, None))

    def name_lease(self) -> str:
        """Return a token that no other lease of this incarnation ever had."""
        self.num_leases += 1
        return f"{self.boot}/{self.num_leases}"

    def take_metadata(self, metadata: TransferMetadata | None) -> None:
        """Pass the orders of a finished forward pass to the data thread."""
        self.orders += metadata.orders if metadata else []

    def digest(self, is_failing: bool) -> None:
        """Digest and publish the data thread's next order, or the first layers of it."""
        order = self.orders.pop(0)
        outcome: ev.SendEvent
        if order.num_parts > 1 and not is_failing:  # the first half of its layers
            self.orders.insert(0, msgspec.structs.replace(order, num_parts=LENT_BEFORE))
            self.book.extend(order.name, order.block_ids, order.first_block, order.group)
            outcome = ev.LayerRange(order.first_block, len(order.block_ids), LAYOUT.block_bytes // 2)
        elif is_failing:
            outcome = ev.RangeFailed(order.first_block, len(order.block_ids), ErrorKind.INTERNAL, "a fault")
        else:
            self._check_states(order)
            digests = tuple(
                self.sink.digest(self.contents[order.group].get(block), seed)
                for block, seed in zip(order.block_ids, order.seeds, strict=True)
            )
            if order.num_parts != LENT_BEFORE:
                self.book.extend(order.name, order.block_ids, order.first_block, order.group)
            outcome = ev.BlockRange(order.first_block, digests)
        self.transfers.send_event(order.key, outcome)

    def _check_states(self, order: PublishOrder) -> None:
        """Check, as the data thread does, that a slot that is published has absorbed the whole prompt (the state rule)."""
        if order.num_tokens:
            (piece,) = order.block_ids
            num_absorbed = len(self.contents[order.group][piece]) - 1
            if num_absorbed != order.num_tokens:
                raise LawBrokenError(
                    f"{self.boot}: {self.named(order.group, piece)} is published for {order.key}, with the states"
                    f" behind {num_absorbed} tokens, not {order.num_tokens}"
                )

    def hear(self, peer: str, frame: bytes) -> None:
        """Take a frame of a decode worker; see ``ControlHalf.link_message``."""
        self.transfers.on_heartbeat(peer)
        message = message_of(frame)
        if isinstance(message, msg.FetchBlocks):
            self.transfers.on_fetch(peer, message)
        else:
            assert isinstance(message, (msg.ReleaseLease, msg.CancelFetch))
            self.transfers.on_release(peer, message)

    def peer_gone(self, peer: str) -> None:
        """Take the end of this decode worker's link."""
        self.transfers.on_peer_gone(peer, "gone")

    def expire(self, peers: tuple[str, ...]) -> None:
        """Let every deadline pass but the leases of ``peers``, which are alive."""
        self.transfers._clock = lambda: 2 * LEASE_SECONDS
        for peer in peers:
            self.transfers.on_heartbeat(peer)
        self.transfers.tick(2 * LEASE_SECONDS)
        self.transfers._clock = no_time
        for peer in peers:
            self.transfers.on_heartbeat(peer)

    def begin_read(self, request: ReadRequest) -> tuple[int, tuple[int, ...]] | None:
        """Return the group and the block ids that a reader reads, None if the lease is over. See ``is_one_sided``."""
        try:
            lease = self.book._begin(request, ignore)
        except StaleLeaseError:
            return None
        lent = lent_for(lease, request)
        blocks = tuple(lent.block_ids[request.within(len(lent.block_ids), lent.first)].tolist())
        if not self.scenario.is_one_sided:
            return cast(NoMemory, lent.region).group, blocks
        self.book._end(request.name, lease, ignore)
        return request.group, blocks  # the reader chooses the region

    def end_read(self, name: LeaseName) -> None:
        """End a counted reader, which is done or has lost its connection."""
        self.book._end(name, self.book._leases[name], ignore)

    def is_valid(self, name: LeaseName) -> bool:
        """Check the lease a second time."""
        try:
            self.book.check(name)
        except StaleLeaseError:
            return False
        return True

    def prepare(self) -> None:
        """Set the shared sink's port of this side."""
        self.sink.new_lease = self.name_lease

    def carry_out(self) -> None:
        """Carry out the effects of the transfers and the book until only messages for others are left."""
        words = []
        while asked := self.sink.take():
            for effect in asked:
                match effect:
                    case ("release", LeaseName() as name):
                        self.book.revoke(name)
                    case ("idle", LeaseName() as name):
                        self.transfers.lease_idle(name)
                    case _:
                        words.append(effect)
        for effect in words:
            self.sink.ask(*effect)

    def tidy(self) -> None:
        """Check that what may be read is held."""
        super().tidy()
        for name, lease in self.book._leases.items():
            for lent in lease.lent:
                group = cast(NoMemory, lent.region).group
                for block in lent.block_ids.tolist():
                    if self.is_free(group, block):
                        raise LawBrokenError(
                            f"{self.boot}: {self.named(group, block)} is free, and lent for {name}"
                        )

    def what_is_held(self) -> list[str]:
        """Return the leases and orders too."""
        held = [f"transfer {one['transfer_id']} is {one['state']}" for one in self.transfers.debug_state()]
        return super().what_is_held() + held + [f"{order.key} is to be digested" for order in self.orders]
