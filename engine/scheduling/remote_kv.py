"""The scheduler's view of KV that other workers compute or read, and of the connector that moves it.

The two stages are given to the engine from above, since they hold what is true of a role: ``prefill_service/kv_sender.py``
lends blocks, and ``decode_service/kv_receiver.py`` is the wait for KV of another worker. An engine has both, whatever its
worker's role is, as its worker may take the other role while it serves. ``engine/connector.py`` has the order of the
connector's calls.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.errors import InvalidRequestError
from contract.requests import EngineRequest, HandOff
from engine.connector import FirstToken, ReceiverConnector, SchedulerConnector, SenderConnector
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.requests.step_plan import StepPlan
from engine.scheduling.tiers.loads import TierLoads
from engine.scheduling.waits.waits import WaitStage


def lease_holder(key: str) -> str:
    """Return the BlockPool's holder of blocks that a finished request still lends."""
    return f"lease:{key}"


class SenderStage(Protocol):
    """Lends the blocks of requests to other workers. A lease outlives its request; see ``lease_holder``."""

    leases: Collection[str]
    """Keys of finished requests whose blocks are still lent."""

    def check(self, engine_request: EngineRequest, index: RequestIndex) -> None:
        """Raise InvalidRequestError for a transfer that is in use, or that this engine has no connector for."""

    def publish(self, plan: StepPlan) -> None:
        """Order the ranks to publish what the step computes of prefill legs."""

    def finish(self, request: Request, first_tokens: Sequence[FirstToken]) -> None:
        """Send the first token of each choice: the prompt is computed, and the receiver continues."""

    def abandon(self, request: Request, finish: Finish) -> bool:
        """Abandon the transfer of a request that finishes; return whether its blocks belong to a lease now."""

    def continuation_of(self, request: Request, order: HandOff) -> EngineRequest:
        """Return the request with which another worker continues one that decodes here.

        Raises InvalidRequestError if the request cannot be handed off now.
        """

    def hand_off(self, request: Request, continuation: EngineRequest) -> None:
        """Lend the KV of a request that decodes to ``continuation_of`` it. Raises InvalidRequestError likewise."""

    def finish_handed_off(self) -> None:
        """Send the newest tokens of requests that were handed off; the ranks have the orders to publish their blocks."""

    def end_leases(self, keys: Collection[str]) -> None:
        """Free the blocks of these requests, which have no reader any more (``finished_sending``)."""

    def withdraw(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> None:
        """Abandon what finished legs of a cancelled request still lend."""


class ReceiverStage(Protocol):
    """Receives KV of other workers into blocks of this engine, for the requests that wait for it.

    num_needed_blocks: blocks that were requested from senders so far, beyond what the cache held. waiting: keys of the
    requests that wait for their KV.
    """

    num_needed_blocks: int
    waiting: Collection[str]

    @property
    def unserved(self) -> Request | None:
        """The first request that waits for blocks to receive into."""

    def process_events(self) -> None:
        """Record what the connector has reported."""

    def note_arrived(self, keys: Collection[str]) -> None:
        """Record the requests whose KV has landed and was verified (``finished_recving``)."""

    def reserve(self, promised: Sequence[int], other: Request | None) -> None:
        """Give blocks to the requests that wait for some, as long as unpromised ones are free; their reads start.

        promised: how many blocks each of some requests elsewhere lacks, which started because these were free.
        other: the first request elsewhere that waits for blocks; those that come after it get none.
        """


class ReceiverWait(ReceiverStage, WaitStage, Protocol):
    """A receiver, in which requests wait as in the other wait stages."""


@dataclass(frozen=True)
class TransferStages:
    """Makes the two stages of an engine with a connector. Picklable: the engine may be in a process of its own.

    sender: (connector, pools, longest prompt and answer) → the stage. receiver: (connector, pools, seconds for which a
    request may wait) → the stage.
    """

    sender: Callable[[SenderConnector, CachePools, int], SenderStage]
    receiver: Callable[[ReceiverConnector, CachePools, float], ReceiverWait]


class NoTransfers:
    """Stands for connector, sender and receiver in an engine without a connector: no request of it has a transfer."""

    leases: Collection[str] = ()
    waiting: Collection[str] = ()
    num_needed_blocks = 0
    unserved = None

    def has_work(self) -> bool:
        """See SchedulerConnector."""
        return False

    def check(self, engine_request: EngineRequest, index: RequestIndex) -> None:
        """See SenderStage."""
        if engine_request.transfer is not None:
            raise InvalidRequestError(
                f"request {engine_request.key} names a transfer, and this engine has no connector"
            )

    def abandon(self, request: Request, finish: Finish) -> bool:
        """See SenderStage."""
        return False

    def continuation_of(self, request: Request, order: HandOff) -> EngineRequest:
        """See SenderStage."""
        raise InvalidRequestError(f"request {request.key} is not handed off: this engine has no connector")

    def _ignore(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is nothing to send, to lend or to receive."""

    build_metadata = publish = finish = hand_off = finish_handed_off = end_leases = withdraw = _ignore
    process_events = note_arrived = reserve = _ignore


_NONE = NoTransfers()


class RemoteKV:
    """A connector with the stages that use it; without one, NoTransfers stands for all three.

    waits: the wait stages among these: the receiver, if the engine has one, and the loads. loads: the wait for blocks of a
    KV tier, which is a peer too. tiers: those tiers. Both are None without tiers.
    """

    def __init__(
        self,
        connector: SchedulerConnector | NoTransfers = _NONE,
        sender: SenderStage = _NONE,
        receiver: ReceiverStage | NoTransfers = _NONE,
        waits: Sequence[WaitStage] = (),
        loads: TierLoads | None = None,
    ) -> None:
        self.connector = connector
        self.sender = sender
        self.receiver = receiver
        self.loads = loads
        self.tiers = loads.tiers if loads else None
        self.waits = [*waits, loads] if loads else list(waits)

    @classmethod
    def over(
        cls,
        connector: SchedulerConnector,
        stages: TransferStages,
        pools: CachePools,
        max_length: int,
        timeout_seconds: float,
        loads: TierLoads | None = None,
    ) -> "RemoteKV":
        """Return a connector with new stages. timeout_seconds: how long a request may wait for its KV."""
        sender = stages.sender(connector.sender, pools, max_length)
        receiver = stages.receiver(connector.receiver, pools, timeout_seconds)
        return cls(connector, sender, receiver, (receiver,), loads)

    def build_metadata(self) -> Any | None:
        """Return the step's orders to the ranks, or None."""
        metadata = self.connector.build_metadata()
        # Only now may a hand-off end: its blocks are published by the orders that were just taken.
        self.sender.finish_handed_off()
        return metadata
