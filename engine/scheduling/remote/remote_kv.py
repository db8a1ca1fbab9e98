"""The scheduler's use of its connector: KV that is lent to other workers, and KV that comes from them.

``engine/connector.py`` has the order of the connector's calls.
"""

from collections.abc import Collection, Sequence
from typing import Any

from contract.errors import InvalidRequestError
from contract.requests import EngineRequest
from engine.connector import FirstToken, SchedulerConnector
from engine.scheduling.remote.kv_receiver import KVReceiver
from engine.scheduling.remote.kv_sender import KVSender
from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex
from engine.scheduling.requests.step_plan import StepPlan


class RemoteKV:
    """Joins a connector with its sender and its receiver. All three are None in an engine without a connector.

    Then no request has a transfer, and every method does nothing.
    """

    def __init__(
        self,
        connector: SchedulerConnector | None = None,
        sender: KVSender | None = None,
        receiver: KVReceiver | None = None,
    ) -> None:
        self.connector = connector
        self.receiver = receiver
        self._sender = sender

    @property
    def leases(self) -> Collection[str]:
        """Keys of finished requests whose blocks are still lent."""
        return self._sender.leases if self._sender else ()

    @property
    def num_fetches(self) -> int:
        """Requests that wait for KV from another engine."""
        return self.receiver.num_waiting if self.receiver else 0

    @property
    def has_work(self) -> bool:
        """True while the connector has events or orders, so that an idle engine makes a step."""
        return self.connector is not None and self.connector.has_work()

    @property
    def unserved(self) -> Request | None:
        """The first request that waits for blocks to receive into."""
        return self.receiver.unserved if self.receiver else None

    def check(self, asked: EngineRequest, index: RequestIndex) -> None:
        """Raise InvalidRequestError for a transfer that is in use, and for one in an engine without a connector."""
        if asked.transfer is None:
            return
        if self._sender is None:
            raise InvalidRequestError(
                f"request {asked.key} names a transfer, and this engine has no connector"
            )
        if self._sender.lends_under(asked) or index.uses_transfer(asked):
            raise InvalidRequestError(
                f"transfer {asked.transfer.transfer_id} (attempt {asked.attempt}) is here already; "
                "each request needs its own"
            )

    # Sending.

    def publish(self, plan: StepPlan) -> None:
        """Order the ranks to publish what the step computes of prefill legs."""
        if self._sender is None:
            return
        for entry in plan:
            if entry.request.is_sending:
                self._sender.publish(entry.request, entry.request.num_computed_tokens + entry.num_tokens)

    def finish(self, request: Request, first_tokens: Sequence[FirstToken]) -> None:
        """Hand the answers of a prefill leg over to the receiver."""
        assert self._sender is not None, "the request has no transfer"
        self._sender.finish(request, first_tokens)

    def hand_off(self, request: Request, continuation: EngineRequest) -> None:
        """Lend the KV of a request that decodes; see ``KVSender.hand_off``."""
        assert self._sender is not None, "the engine has no connector"
        self._sender.hand_off(request, continuation)

    def abandon(self, request: Request, finish: Finish) -> bool:
        """Abandon the transfer of a request that finishes; return whether its blocks belong to a lease now."""
        return self._sender is not None and self._sender.abandon(request, finish)

    def withdraw(self, request_id: str, up_to_attempt: int | None, choice: int | None) -> None:
        """Abandon what finished legs of a cancelled request still lend."""
        if self._sender:
            self._sender.withdraw(request_id, up_to_attempt, choice)

    def end_leases(self, keys: Collection[str]) -> None:
        """Free the blocks of these requests, which have no reader any more."""
        if self._sender:
            self._sender.end_leases(keys)

    def build_metadata(self) -> Any | None:
        """Return the step's orders to the ranks, or None."""
        if self.connector is None or self._sender is None:
            return None
        metadata = self.connector.build_metadata()
        self._sender.finish_handed_off()
        return metadata

    # Receiving.

    def note_arrived(self, keys: Collection[str]) -> None:
        """Record the requests whose KV has landed and was verified."""
        if self.receiver:
            self.receiver.note_arrived(keys)

    def take_events(self) -> None:
        """Record what the connector has reported."""
        if self.receiver:
            self.receiver.take_events()

    def reserve(self, num_promised: int, other: Request | None) -> None:
        """Give blocks to requests that their senders have computed; see ``KVReceiver.reserve``."""
        if self.receiver:
            self.receiver.reserve(num_promised, other)
