"""The interface between an engine and a KV connector, which ``kv_transfer`` implements.

A connector has two sides. ``SchedulerConnector``, with its roles ``sender`` and ``receiver``, is beside the scheduler and
is called only from the core's step thread; none of its methods blocks. A ``RankConnector`` is in the process of each rank,
beside its KV memory, and moves and digests bytes in threads of its own. The scheduler keeps ownership of all blocks: a
connector is *lent* block ids, and reports when it is done with them.

The life of one hand-over, on the sender's side (prefill):
1. ``open_send`` when the blocks of the whole prompt are reserved, before the first chunk runs;
2. ``publish`` for each step that will compute more of the prompt; the metadata of that step carries the order to the
   ranks, which carry it out after the forward pass;
3. ``finish_send`` with the sampled token, or ``abandon_send`` when the answer ended or the request was aborted (an
   abort may come after ``finish_send`` too, while the receiver has not released the blocks). For a request that is handed
   off while it decodes, everything is computed at ``open_send``, and ``finish_send`` follows the next ``build_metadata``;
4. the request's id in ``ModelRunnerOutput.finished_sending``, exactly once, after ``finish_send`` or ``abandon_send``:
   the blocks are not read any more, and the scheduler drops the transfer's references.

On the receiver's side (decode):
1. ``start_fetch`` when the request is added; it holds no block. A connector that ``ExpectsRequests`` may have begun before;
2. a ``Published`` event: the sender has published its first range, so the scheduler may reserve;
3. ``receive_into`` with the reserved blocks;
4. the id in ``finished_recving``: every byte has landed and was verified; ``pop_received`` gives the tokens; or
   a ``Failed`` event: nothing of it may be used. ``Failed`` comes only when no read is outstanding;
5. ``cancel_fetch`` at any time before: returns True when no read is outstanding (free the blocks now), else False: the
   blocks stay quarantined until a ``Drained`` event.
"""

import pkgutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from contract.errors import InternalError, SettingError
from contract.layout import KVLayout
from contract.outputs import TokenLogprobs, TransferReport
from contract.requests import EngineRequest, ReceiveTransfer

if TYPE_CHECKING:
    from engine.device_pool import DevicePool


@dataclass(frozen=True)
class Published:
    """The sender computes this request's prompt, or has published a range of it: the receiver may reserve its blocks.

    kv_fingerprint: what the hashes of this KV start from instead of this engine's model fingerprint, where the sender
    computes another KV (``contract.layout.received_fingerprint``); None if it is the same.
    """

    key: str
    kv_fingerprint: str | None = None


NOT_NEEDED_KIND = "not_needed"
"""The kind of a transfer that ended because the first token was the whole answer; no error."""


@dataclass(frozen=True)
class Failed:
    """The transfer of this request failed and no read is outstanding.

    kind: an ErrorKind value, or "not_needed" when the first token ended the answer at the sender, which is no error.
    """

    key: str
    kind: str
    message: str


@dataclass(frozen=True)
class Drained:
    """The last read of a cancelled fetch is terminal: its quarantined blocks may be freed."""

    key: str


Tables = Sequence[Sequence[int]]
"""Blocks of several groups of layers (``contract.cache_layout``)."""
TransferEvent = Published | Failed | Drained


@dataclass(frozen=True)
class FirstToken:
    """The first token of a choice, sampled by the sender."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Received:
    """The content of a finished transfer: the first token of every choice, and what the transfer took."""

    first_tokens: list[FirstToken]
    report: TransferReport
    lacks_heads: bool = False  # blocks with which windows begin have no first tokens, and must not be found


class SenderConnector(Protocol):
    """The sender's role beside the scheduler: prompts whose KV is lent. ``key``: ``EngineRequest.key``."""

    def open_send(
        self, request: EngineRequest, block_ids: list[int], num_cached_tokens: int, last: Tables = ()
    ) -> None:
        """Lend ``block_ids`` (the whole prompt's). The first ``num_cached_tokens`` are computed already.

        block_ids: of the first group of layers if it keeps all tokens, else none. last: see ``publish``; given here if
        the whole prompt is computed.
        """

    def publish(self, key: str, num_computed_tokens: int, last: Tables = ()) -> None:
        """Publish the prompt up to ``num_computed_tokens``, which the coming forward pass will have computed.

        Only full blocks are published, and the partly filled last one when the whole prompt is computed. last: with the
        last of it, for each group of layers with a window, the blocks that the next token sees (``CacheGroup.seen_blocks``);
        behind these, the pieces of the slot with the states of recurrent layers, which are published when the step is over.
        """

    def finish_send(self, key: str, first_tokens: list[FirstToken]) -> None:
        """Complete a transfer whose prompt is computed and published, with the first token of every choice."""

    def abandon_send(self, key: str, kind: str, message: str) -> None:
        """End a transfer that is of no use: the answer ended at its first token (NOT_NEEDED), or abort or error.

        It may follow ``finish_send``, when the client has gone; a transfer that was released meanwhile is left alone.
        """


class ReceiverConnector(Protocol):
    """The receiver's role: prompts whose KV is fetched. ``key``: ``EngineRequest.key``."""

    def start_fetch(self, request: EngineRequest) -> None:
        """Ask the sender named in ``request.transfer`` for this request's KV."""

    def receive_into(
        self, key: str, block_ids: list[int], num_cached_blocks: int, other_groups: Tables = ()
    ) -> None:
        """Pull the prompt's blocks into ``block_ids`` (one per block of the prompt, in order).

        The first ``num_cached_blocks`` are held already by the receiver's prefix cache and are not moved. other_groups: the
        tables of the groups of layers after the first. Of one with a window, only the blocks that the next token sees move;
        of the last, with states, the pieces of a slot, which all move. Without KV these are ``block_ids``.
        """

    def cancel_fetch(self, key: str) -> bool:
        """Stop fetching. True: no read is outstanding. False: a ``Drained`` event will follow."""

    def pop_received(self, key: str) -> Received:
        """Return the content of a transfer that is in ``finished_recving``; called exactly once."""

    def pop_events(self) -> list[TransferEvent]:
        """Return the events since the last call, in order. Raises InternalError if the connector is broken."""

    def next_arrival(self) -> float | None:
        """Return when, on the monotonic clock, the next fetch is expected to end; None if no sender has announced an end."""

    def has_arrived(self) -> bool:
        """Return whether a fetch is over that is not in ``finished_recving`` yet; from any thread, within ``wake`` too."""


class SchedulerConnector(Protocol):
    """The half beside the scheduler. Called from one thread; no call blocks or does I/O."""

    @property
    def sender(self) -> SenderConnector:
        """The sender's role."""

    @property
    def receiver(self) -> ReceiverConnector:
        """The receiver's role."""

    def build_metadata(self) -> Any | None:
        """Return this step's orders to the ranks (``SchedulerOutput.kv_connector_metadata``), or None."""

    def has_work(self) -> bool:
        """Return whether events or orders wait, so that an idle core must make a step."""

    def debug_state(self) -> dict[str, Any]:
        """Return transfers, leases and peers as plain data, for ``/debug/state``."""

    def counters(self) -> dict[str, float]:
        """Return counters, name → value; labels are part of a name, as in ``transfer_blocks_total{transport=tcp}``."""

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """Have every peer shake hands again with the fingerprint of other weights. Nothing is lent or fetched now."""

    def close(self) -> None:
        """Stop the I/O thread and close every socket."""


class ExpectsRequests(Protocol):
    """A ``ReceiverConnector`` that can begin before a request is added to the scheduler. Called from any thread."""

    def connect(self, transfer: ReceiveTransfer, then: Callable[[], None]) -> None:
        """Connect to a sender, from which a request may come. ``then`` is called when that is over, even if it has failed.

        It is called within this call, or in any thread.
        """

    def expect(self, request: EngineRequest) -> None:
        """Ask for the KV of a request for which ``start_fetch`` or ``drop_expected`` follows.

        ``pop_events`` returns no event of it before. Raises InternalError for one whose KV is being fetched already.
        """

    def drop_expected(self, key: str) -> None:
        """Stop fetching for a request that is not added after all; ignores one without ``expect``, or that was added."""


class StateRecord(Protocol):
    """The record of how many tokens the states in each slot have absorbed (``contract.state_layout``). From any thread."""

    def check(self, pieces: Sequence[int], num_tokens: int) -> None:
        """Raise InternalError unless these pieces are of a slot with the states behind ``num_tokens`` tokens."""

    def note_received(self, pieces: Sequence[int], num_tokens: int) -> None:
        """Record that the slot of these pieces has the states behind so many tokens, which another engine computed."""


class Computed(Protocol):
    """A point in a device's work."""

    def synchronize(self) -> None:
        """Wait until the device has reached it; from any thread."""


class KVMemory(Protocol):
    """A pool of KV blocks as bytes. On CPU the views are the pool itself."""

    layout: KVLayout
    num_blocks: int

    @property
    def regions(self) -> "Sequence[KVMemory]":
        """The pool of each group of layers, in one allocation; this one is the first."""

    @property
    def states(self) -> StateRecord | None:
        """The record of what slots have absorbed, beside a region of their pieces; None beside one of blocks."""

    @property
    def start(self) -> int:
        """The byte of the file ``memfd`` at which block 0 begins."""

    @property
    def memfd(self) -> int | None:
        """Descriptor of the file with all regions; it may be sealed. None: the pool is not mapped.

        Block i of this one is at start + i · block_bytes.
        """

    @property
    def pool_view(self) -> memoryview | None:
        """The pool in host memory, block i at i · block_bytes. None on a device, where no view is the pool itself."""

    @property
    def device_pool(self) -> "DevicePool | None":
        """This pool, if it is on a device where a library may write it; None in host memory."""

    def read_view(self, block_id: int) -> memoryview:
        """Return the bytes of one block, valid at once; on CUDA a host copy of what is computed already."""

    def write_view(self, block_id: int) -> memoryview:
        """Return the memory for the bytes of one block of a pool in host memory."""

    def commit(self, block_ids: list[int]) -> None:
        """Make what was written before, to these blocks of any region, visible to later steps (nothing to do on CPU)."""

    def mark_computed(self) -> Computed:
        """Return what waits for everything that was launched before this call; wait for it before its blocks are read."""


def mark_computed(memory: KVMemory) -> Computed:
    """Return what waits for everything that was launched before, in all regions: a step works on one stream."""
    marks = [region.mark_computed() for region in memory.regions]
    return marks[0]


def states_of(memory: KVMemory) -> StateRecord:
    """Return the record of a region of slots. Raises InternalError for one of blocks."""
    if memory.states is None:
        raise InternalError("a region of blocks has no states")
    return memory.states


class LayerWatch(Protocol):
    """An observer of one forward pass while it runs. None of its methods blocks."""

    def on_stored(self, num_layers: int) -> None:
        """Note that the KV of the first ``num_layers`` layers is written; called for each layer, before its attention."""

    def on_computed(self) -> None:
        """Note that the pass is over. No token is sampled yet."""


class RankConnector(Protocol):
    """The half of one rank, beside its KV memory. All but ``start`` and ``close`` are called from the step thread."""

    def start(self, memory: KVMemory) -> None:
        """Begin to work on an allocated pool; called exactly once, before any other method."""

    def watch_layers(self, metadata: Any) -> LayerWatch | None:
        """Return the observer of a step's forward pass, or None; called before the pass."""

    def execute(self, metadata: Any) -> None:
        """Carry out a step's orders, after that step's forward pass has been computed. Does not block."""

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return request ids (finished_sending, finished_recving) since the last call."""

    def close(self) -> None:
        """Stop the data thread. Outstanding reads are terminal when this returns."""


class RankConnectorPlan(msgspec.Struct, frozen=True):
    """The instructions by which a rank's process opens its half of a connector.

    opener: "module:function" that takes (settings, socket) and returns a ``RankConnector``. descriptor: of the socket to the
    scheduler's half, in that process.
    """

    opener: str
    settings: bytes
    descriptor: int

    def open(self) -> RankConnector:
        """Open the half, which owns the socket from then on. Raises what the opener raises."""
        opener: Callable[[bytes, socket.socket], RankConnector] = pkgutil.resolve_name(self.opener)
        return opener(self.settings, socket.socket(fileno=self.descriptor))


class RanksConnector(Protocol):
    """The halves beside the KV memory of an engine's ranks, as its executor handles them.

    An executor whose only rank is in its own process calls ``in_process``. Any other one calls ``connect``, has every rank
    open its half, and calls ``begin``; it calls ``close`` when the ranks have ended.
    """

    def in_process(self) -> RankConnector:
        """Return the half of the only rank. Raises SettingError if there are several."""

    def connect(self, sockets: Sequence[socket.socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """Take our ends of the ranks' sockets, in rank order, and return how each rank opens its half.

        peers: descriptors of the other ends, each in its rank's process. Raises SettingError if there is one rank only.
        """

    def begin(self) -> None:
        """Begin to serve peers: every rank has opened its half and started it on its pool."""

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return request ids (finished_sending, finished_recving) since the last call, finished on all ranks."""

    def close(self) -> None:
        """Close the sockets. May be called twice, and before ``connect``."""


class SingleRankConnector:
    """Fulfils ``RanksConnector`` with the half of an engine's only rank, which is called without anything in between."""

    def __init__(self, half: RankConnector) -> None:
        self._half = half
        self.get_finished = half.get_finished
        self.close = half.close

    def in_process(self) -> RankConnector:
        """See RanksConnector."""
        return self._half

    def connect(self, sockets: Sequence[socket.socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """Raise SettingError; the sockets are closed."""
        for each in sockets:
            each.close()
        raise SettingError(
            f"tensor_parallel_size is {len(peers)}, and this connector serves engines of one rank only",
            param="tensor_parallel_size",
        )

    def begin(self) -> None:
        """See RanksConnector."""


@dataclass(frozen=True)
class ConnectorPair:
    """Both sides of a connector, and what it can do beside the calls that every connector has.

    address: "host:port" of the control link, for the worker's registration. expecting: None if it cannot begin before a
    request is added. progress: returns each thread's count, and has each thread count once more after the work that it has
    now; called from any thread, without waiting for one. A connector that does not show whether its threads work has none.
    """

    scheduler: SchedulerConnector
    ranks: RanksConnector
    address: str
    expecting: ExpectsRequests | None = None
    progress: Callable[[], dict[str, int]] = dict
