"""A public fake of a connector: both directions of ``engine/connector.py``, driven by the test instead of by a peer.

The test decides when a sender publishes, when bytes land and when a cancelled read is terminal. The fake asserts the
order of calls that the contract demands, that published KV is computed, and that lent KV stays unchanged until the
lease ends. A late read overwrites its blocks just before it is ``Drained``, so a block that was reused too early is
detected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ErrorKind, KvbatonError
from contract.layout import Side
from contract.outputs import TransferReport
from contract.requests import EngineRequest
from engine.connector import (
    ConnectorPair,
    Drained,
    ExpectsRequests,
    Failed,
    FirstToken,
    Published,
    Received,
    SingleRankConnector,
    TransferEvent,
)
from tests.fakes.engine.fakes import fake_first_token, fake_token
from tests.fakes.engine.memory import FakeMemory, prefix_codes


@dataclass
class FakeSend:
    """One prompt whose blocks are lent. last: the last blocks of the groups with a window, once they are published.

    pieces: of its slot, if the model has recurrent layers.
    """

    codes: list[int]
    block_ids: list[int]
    num_published: int
    last: list[list[int]] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    end: str | None = None
    first_tokens: list[FirstToken] = field(default_factory=list)


@dataclass
class FakeFetch:
    """One prompt that is fetched. ``state``: asked → published → reading → landed, or draining, or failed.

    num_delivered: tokens of the answer at the prompt's end, for a replay.
    """

    prompt: list[int]
    seed: int = 0
    num_choices: int = 1
    num_delivered: int = 0
    state: str = "asked"
    tables: list[list[int]] = field(default_factory=list)
    pieces: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0

    @property
    def destinations(self) -> list[list[int]]:
        """The blocks of each group that the read writes into."""
        return [[block for block in table[self.num_cached_blocks :] if block] for table in self.tables]

    @property
    def destination(self) -> list[int]:
        """The blocks of the first group."""
        return self.destinations[0] if self.tables else []


class FakeRank:
    """The rank's half. It checks each order against the KV in the pool."""

    def __init__(self, transfers: "FakeConnector") -> None:
        self._transfers = transfers
        self.finished_sending: set[str] = set()
        self.finished_recving: set[str] = set()
        self.is_closed = False
        self.model_fingerprint = ""

    def start(self, memory: Any) -> None:
        """Attach the pool's memory."""
        self._transfers.memory = memory

    def watch_layers(self, metadata: Any) -> None:
        """Return None: no layer is watched."""

    def execute(self, metadata: Any) -> None:
        """Publish ``(key, num_tokens)`` for each order, after checking that these tokens are computed."""
        for key, num_tokens in metadata:
            send = self._transfers.sends[key]
            self._transfers.check_lent(send, num_tokens)
            send.num_published = num_tokens

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return the keys of finished sends and fetches since the last call."""
        done = self.finished_sending, self.finished_recving
        self.finished_sending = set()
        self.finished_recving = set()
        return done

    def close(self) -> None:
        """Record the call: there is nothing to stop."""
        self.is_closed = True


class FakeConnector:
    """The scheduler's half. The test drives it: ``publish_peer``, ``land``, ``fail``, ``drain``, ``end_lease``."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self.memory: FakeMemory | None = None
        self.rank = FakeRank(self)
        self.sends: dict[str, FakeSend] = {}
        self.fetches: dict[str, FakeFetch] = {}
        self.is_closed = False
        self.lacks_heads = False
        self.expected: float | None = None
        self.refusal: KvbatonError | None = None
        self.expecting: ExpectsRequests | None = None
        self._wake = wake
        self._orders: list[tuple[str, int]] = []
        self._events: list[TransferEvent] = []

    @property
    def pool_memory(self) -> FakeMemory:
        """The fake KV. Available after ``rank.start``."""
        assert self.memory is not None, "the rank was not started"
        return self.memory

    # Called by the test.

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the function that is called when there is an event to take."""
        self._wake = wake

    def publish_peer(self, key: str) -> None:
        """Publish the peer's first range."""
        assert self.fetches[key].state == "asked"
        self.fetches[key].state = "published"
        self._report(Published(key))

    def land(self, key: str) -> None:
        """Complete a fetch: all its KV has arrived and is verified."""
        fetch = self.fetches[key]
        assert fetch.state == "reading"
        fetch.state = "landed"
        size = self.pool_memory.layout.block_size
        codes = prefix_codes(fetch.prompt)
        for memory, table in zip(self.pool_memory.regions, fetch.tables, strict=True):
            num_passed = next(place for place, block in enumerate(table) if block)
            memory.write(table, codes, max(fetch.num_cached_blocks, num_passed) * size, len(codes))
        if (states := self.pool_memory.states) is not None:
            states.land(fetch.pieces, codes)
        self.rank.finished_recving.add(key)
        self._wake()

    def fail(self, key: str, kind: str = "transfer_failed", message: str = "the peer is gone") -> None:
        """Fail a fetch and leave garbage in its blocks. It can be cancelled until its ``Failed`` event is taken."""
        self.fetches[key].state = "failed"
        self._scribble(self.fetches[key])
        self._report(Failed(key, kind, message))

    def drain(self, key: str) -> None:
        """End the last read of a cancelled fetch, after one more write into its blocks."""
        fetch = self.fetches.pop(key)
        assert fetch.state == "draining"
        self._scribble(fetch)
        self._report(Drained(key))

    def end_lease(self, key: str) -> None:
        """End a lease as a peer does that has read everything. Asserts that the blocks still hold what was published."""
        send = self.sends.pop(key)
        assert send.end is not None
        self.check_lent(send, send.num_published)
        self.rank.finished_sending.add(key)
        self._wake()

    def check_lent(self, send: FakeSend, num_tokens: int) -> None:
        """Assert that the lent blocks hold the KV of the first ``num_tokens``, and those of windows of their last tokens."""
        size = self.pool_memory.layout.block_size
        if send.block_ids:
            self.pool_memory.check(send.block_ids, send.codes, num_tokens)
        if send.pieces and (states := self.pool_memory.states) is not None:
            states.check(send.pieces, len(send.codes), send.codes[-1])
        num_blocks = -(-len(send.codes) // size)
        regions = self.pool_memory.regions[-len(send.last) :] if send.last else ()
        for memory, own in zip(regions, send.last, strict=True):
            assert 0 not in own
            start = num_blocks - len(own)
            memory.check([*[0] * start, *own], send.codes, num_tokens, start * size)

    # Called by the scheduler.

    @property
    def sender(self) -> "FakeConnector":
        """See SchedulerConnector."""
        return self

    @property
    def receiver(self) -> "FakeConnector":
        """See SchedulerConnector."""
        return self

    def open_send(
        self,
        request: EngineRequest,
        block_ids: list[int],
        num_cached_tokens: int,
        last: Sequence[Sequence[int]] = (),
    ) -> None:
        """See SchedulerConnector."""
        size = self.pool_memory.layout.block_size
        assert request.key not in self.sends
        assert len(block_ids) in (0, -(-len(request.prompt_token_ids) // size))
        codes = prefix_codes(request.prompt_token_ids)
        send = FakeSend(codes, list(block_ids), num_cached_tokens)
        self._add_last(send, last)
        self.check_lent(send, num_cached_tokens)
        self.sends[request.key] = send

    def publish(self, key: str, num_computed_tokens: int, last: Sequence[Sequence[int]] = ()) -> None:
        """See SchedulerConnector."""
        send = self.sends[key]
        assert not last or num_computed_tokens == len(send.codes)
        self._add_last(send, last)
        assert send.end is None and send.num_published < num_computed_tokens <= len(send.codes)
        self._orders.append((key, num_computed_tokens))

    def finish_send(self, key: str, first_tokens: list[FirstToken]) -> None:
        """See SchedulerConnector."""
        send = self.sends[key]
        assert send.end is None and send.num_published == len(send.codes)
        send.end = "finished"
        send.first_tokens = first_tokens

    def abandon_send(self, key: str, kind: str, message: str) -> None:
        """See SchedulerConnector."""
        send = self.sends.get(key)
        assert message and (kind == ErrorKind.CANCELLED or (send is not None and send.end is None))
        if send is not None and send.end in (None, "finished"):
            send.end = kind

    def start_fetch(self, request: EngineRequest) -> None:
        """See SchedulerConnector. Raises ``refusal`` if the test has set one."""
        if self.refusal:
            raise self.refusal
        assert request.key not in self.fetches
        self.fetches[request.key] = FakeFetch(
            list(request.prompt_token_ids),
            request.sampling.seed,
            request.num_choices,
            request.num_delivered_tokens,
        )

    def receive_into(
        self,
        key: str,
        block_ids: list[int],
        num_cached_blocks: int,
        other_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        """See SchedulerConnector."""
        fetch = self.fetches[key]
        size = self.pool_memory.layout.block_size
        assert fetch.state == "published"
        fetch.tables = list(map(list, (block_ids, *other_groups)))
        codes = prefix_codes(fetch.prompt)
        if (states := self.pool_memory.states) is not None:
            fetch.pieces = fetch.tables.pop()
            states.begin_reading(fetch.pieces)
        for memory, table in zip(self.pool_memory.regions, fetch.tables, strict=True):
            assert len(table) == -(-len(fetch.prompt) // size)
            num_passed = next(place for place, block in enumerate(table) if block)
            memory.check(table, codes, num_cached_blocks * size, num_passed * size)
        fetch.state = "reading"
        fetch.num_cached_blocks = num_cached_blocks

    def cancel_fetch(self, key: str) -> bool:
        """See SchedulerConnector. A read that has begun continues until ``drain``."""
        if self.fetches[key].state == "reading":
            self.fetches[key].state = "draining"
            return False
        del self.fetches[key]
        return True

    def pop_received(self, key: str) -> Received:
        """See SchedulerConnector."""
        fetch = self.fetches.pop(key)
        assert fetch.state == "landed"
        code = prefix_codes(fetch.prompt)[-1]
        if fetch.num_delivered:  # the sender goes on with an answer: its token is not the first one
            tokens = [fake_token(code)]
        else:
            tokens = [fake_first_token(code, fetch.seed, choice) for choice in range(fetch.num_choices)]
        first_tokens = [FirstToken(token) for token in tokens]
        return Received(
            first_tokens,
            TransferReport(0.25, 0.5, 4 * len(fetch.destination), len(fetch.destination)),
            self.lacks_heads,
        )

    def pop_events(self) -> list[TransferEvent]:
        """See SchedulerConnector."""
        events = self._events
        self._events = []
        for event in events:
            if isinstance(event, Failed):
                self.fetches.pop(event.key, None)
        return events

    def next_arrival(self) -> float | None:
        """See SchedulerConnector."""
        return self.expected

    def has_arrived(self) -> bool:
        """See SchedulerConnector."""
        return bool(self.rank.finished_recving)

    def build_metadata(self) -> Any | None:
        """See SchedulerConnector."""
        orders = self._orders
        self._orders = []
        return orders or None

    def has_work(self) -> bool:
        """See SchedulerConnector."""
        return bool(self._events or self._orders or self.rank.finished_sending or self.rank.finished_recving)

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """See SchedulerConnector."""
        self.model_fingerprint = model_fingerprint

    def debug_state(self) -> dict[str, Any]:
        """See SchedulerConnector."""
        return {
            "sends": len(self.sends),
            "fetches": {key: fetch.state for key, fetch in self.fetches.items()},
        }

    def counters(self) -> dict[str, float]:
        """See SchedulerConnector."""
        return {"transfer_leases": float(len(self.sends))}

    def close(self) -> None:
        """See SchedulerConnector."""
        self.is_closed = True

    def _scribble(self, fetch: FakeFetch) -> None:
        for memory, blocks in zip(self.pool_memory.regions, fetch.destinations, strict=False):
            memory.scribble(blocks)
        if fetch.pieces and (states := self.pool_memory.states) is not None:
            states.scribble(fetch.pieces)

    def _add_last(self, send: FakeSend, last: Sequence[Sequence[int]]) -> None:
        blocks = list(map(list, last))
        if blocks and self.pool_memory.states is not None:
            send.pieces = blocks.pop()
        send.last += blocks

    def _report(self, event: TransferEvent) -> None:
        self._events.append(event)
        self._wake()


def fake_connector_factory(side: Side, fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
    """Create a fake connector. A picklable ConnectorFactory; its address belongs to no process."""
    connector = FakeConnector(wake)
    return ConnectorPair(connector, SingleRankConnector(connector.rank), "127.0.0.1:9")
