"""A worker's step thread: production's scheduler over a model whose KV is the tokens that it was computed from."""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

from contract.cache_layout import CacheGroup, CacheLayout, GroupedSide
from contract.errors import KvbatonError
from contract.identity import Role
from contract.layout import KVLayout
from contract.outputs import EngineOutput
from contract.requests import HandOff, ReceiveTransfer, SendTransfer
from contract.state_layout import StateLayout, StatePart
from engine.connector import ReceiverConnector, SenderConnector, TransferEvent
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.blocks.block_pool import NULL_BLOCK
from engine.scheduling.blocks.cache_pools import CachePools, pool_of
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.inspection import check_integrity
from engine.scheduling.live_requests import Limits
from engine.scheduling.remote_kv import RemoteKV, TransferStages
from engine.scheduling.scheduler import Scheduler
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.sending import SendTransfers
from kv_transfer.counters import Completions
from kv_transfer.protocol.orders import PublishOrder, TransferMetadata
from kv_transfer.settings import LocalWorker, TransferSettings
from tests.protocol.scenario import BLOCK_SIZE, MODEL, VOCABULARY, Scenario, asked_of, content_of_hashes
from tests.protocol.sink import LawBrokenError, Sink

Content = tuple[int, ...]
LEASE_SECONDS = 10.0
HANDED_OVER = "handed over"
"""Stands in an entry in place of its finish reason."""
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="bfloat16")
STATES = StateLayout((StatePart(layer=2, name="recurrent", shape=(1,), dtype="float32"),))
"""The states of a third layer, in a world with slots. A slot has one piece, with the number before the slot's."""
_TAGS: dict[str, Content] = {"block {0}": (), "block {0} of the window's": (-3,), "slot {1}": (-4,)}
"""By the name of what a group consists of, what stands before the tokens in its contents: layers differ in their KV.

In a name {0} is the number of the block, or piece, and {1} the next one.
"""


@cache
def groups_of(scenario: Scenario) -> tuple[CacheGroup, ...]:
    """Return the groups of the model's two layers: one, or one for each."""
    return CacheLayout.of(LAYOUT, [None, scenario.window]).groups


@cache
def kinds_of(scenario: Scenario) -> tuple[str, ...]:
    """Return the name of what each group of a transfer consists of; the slots are the last one."""
    is_there = (True, scenario.window is not None, scenario.num_slots > 0)
    return tuple(name for name, has_some in zip(_TAGS, is_there, strict=True) if has_some)


def no_time() -> float:
    """Return 0: time is an action of the explorer."""
    return 0.0


class NoFetches:
    """The receiver's role in a worker that only sends."""

    def pop_events(self) -> list[TransferEvent]:
        return []


class Connector:
    """A ``SchedulerConnector`` of a worker that only sends, or only fetches."""

    def __init__(self, sends: SendTransfers | None, fetches: FetchTransfers | None) -> None:
        self._sends, self._fetches = sends, fetches

    @property
    def sender(self) -> SenderConnector:
        """Not called in a worker that only fetches."""
        return cast(SenderConnector, self._sends)

    @property
    def receiver(self) -> ReceiverConnector:
        return self._fetches or cast(ReceiverConnector, NoFetches())

    def build_metadata(self) -> TransferMetadata | None:
        orders: list[PublishOrder] = self._sends.pop_orders() if self._sends else []
        return TransferMetadata(orders) if orders else None

    def has_work(self) -> bool:
        """Return whether the transfers have something for the scheduler; the worker takes completions itself."""
        has_events = self._fetches is not None and self._fetches.has_events()
        return has_events or (self._sends is not None and self._sends.has_orders())

    def set_model_fingerprint(self, model_fingerprint: str) -> None:
        """Do nothing: the weights of this world are never reloaded."""

    def debug_state(self) -> dict[str, Any]:
        return {}

    def counters(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Do nothing: no thread runs here."""


class EngineSide:
    """Owns scheduler, pools and what the blocks contain. A subclass adds the worker's transfers and its data half.

    contents: by group of layers and block; the last ones are those of slots, by piece, in a world with states.
    """

    def __init__(self, scenario: Scenario, sink: Sink, boot: str, num_blocks: int, budget: int) -> None:
        self.scenario, self.sink, self.boot = scenario, sink, boot
        groups = groups_of(scenario)
        sizes = (num_blocks, scenario.window_blocks)
        pools = [
            pool_of(group, size + 1, enable_prefix_caching=scenario.caches_prefixes)
            for group, size in zip(groups, sizes, strict=False)
        ]
        states = scenario.rules.state_slots(scenario.num_slots) if scenario.num_slots else None
        self.pools = CachePools(groups, pools, budget, states)
        self.completions = Completions()
        self.contents: list[dict[int, Content]] = [{} for _ in kinds_of(scenario)]

    def make_worker(self, **changes: Any) -> LocalWorker:
        """Return what production's transfers get of their worker."""
        settings = TransferSettings(
            worker_id="w",
            boot_id=self.boot,
            role=Role.PREFILL,
            secret="secret",
            transport="tcp",
            lease_seconds=LEASE_SECONDS,
            parked_seconds=LEASE_SECONDS,
            **changes,
        )
        states = STATES if self.scenario.num_slots else None
        side = GroupedSide.of(self.pools.groups, 1, LAYOUT.num_kv_heads, states)
        return LocalWorker(settings, side, MODEL, wake=lambda: None, completions=self.completions)

    def make_scheduler(self, stages: TransferStages, connector: Connector) -> Scheduler:
        """Create production's scheduler, with its stages or a mutant's."""
        settings = self.scenario.settings(self.pools.max_chunk)
        limits = Limits.of(self.pools, 64, VOCABULARY, MODEL)
        remote_kv = RemoteKV.over(
            connector, stages, self.pools, limits.max_length, settings.remote_kv_timeout_seconds
        )
        return Scheduler(settings, self.pools, limits, remote_kv=remote_kv, clock=no_time)

    scheduler: Scheduler

    @property
    def needs_step(self) -> bool:
        """Return whether a step may change something."""
        return self.scheduler.needs_step() or not self.completions.is_empty

    def accept(
        self, number: int, attempt: int, num_delivered: int, transfer: SendTransfer | ReceiveTransfer | None
    ) -> None:
        """Take the router's request; answer it with an error if the engine refuses it."""
        asked = asked_of(self.scenario, number, attempt, num_delivered, transfer)
        try:
            self.scheduler.add_request(asked)
        except KvbatonError as error:
            self.scheduler.reject(asked, error)

    def cancel(self, request_id: str, attempt: int | None) -> None:
        """Cancel a request of the router."""
        self.scheduler.abort_request(request_id, attempt)

    def abort_all(self) -> None:
        """Abort all requests: the router's stream is lost."""
        for asked in [request.engine_request for request in self.scheduler.requests.values()]:
            self.scheduler.abort_request(asked.request_id, asked.attempt)

    def step(self) -> None:
        """Take in what arrived, schedule, compute, update."""
        self.scheduler.on_transfers_finished(*self.completions.drain())
        output = self.scheduler.schedule()
        computed = self._compute(output)
        self.take_metadata(output.kv_connector_metadata)
        computed.finished_sending, computed.finished_recving = self.completions.drain()
        self._send(self.scheduler.update_from_output(output, computed))

    def hand_off(self, number: int, attempt: int, next_attempt: int) -> bool:
        """Hand a request off; return False if that is refused."""
        order = HandOff(
            request_id=str(number),
            attempt=attempt,
            choice=0,
            transfer_id=f"t{number}",
            next_attempt=next_attempt,
        )
        try:
            self._carry_out_hand_off(order)
        except KvbatonError:
            return False
        self._send(self.scheduler.flush_urgent())
        return True

    def _carry_out_hand_off(self, order: HandOff) -> None:
        self.scheduler.hand_off(order)

    def _send(self, outputs: dict[int, list[EngineOutput]]) -> None:
        for one in (one for of_client in outputs.values() for one in of_client):
            end = HANDED_OVER if one.handed_over else one.finish_reason and str(one.finish_reason)
            self.sink.ask(
                "entry",
                int(one.request_id),
                one.attempt,
                one.first_index,
                tuple(one.token_ids),
                end,
                one.error_kind and str(one.error_kind),
            )

    def take_metadata(self, metadata: TransferMetadata | None) -> None:
        """Take this step's orders to the data half."""
        assert metadata is None

    def tidy(self) -> None:
        """Check the laws that hold here, and renumber requests and blocks in the same order. Called after every call."""
        check_integrity(self.scheduler)
        expected = content_of_hashes(self.scenario)
        for group, pool in enumerate(self.pools.pools):
            for block_hash, block in pool._index._block_by_hash.items():
                if self.contents[group].get(block) != self.kv_of(group, expected[block_hash]):
                    name = self.named(group, block)
                    raise LawBrokenError(
                        f"{self.boot}: {name} can be found by a content that it does not hold"
                    )
        in_order = sorted(self.scheduler.requests.values(), key=lambda request: request.arrival_number)
        for arrival_number, request in enumerate(in_order):
            request.arrival_number = arrival_number
        self.scheduler.totals.num_requests = len(in_order)
        if (
            not self.scenario.caches_prefixes
        ):  # free blocks without content differ by nothing but their numbers
            for pool in self.pools.pools:
                for block in sorted(pool._free):
                    pool._free.move_to_end(block)
            if self.pools.states is not None:
                self.pools.states._free.sort(reverse=True)

    def what_is_held(self) -> list[str]:
        """Return what must not exist once everything is quiet."""
        held = [f"request {key} is {one.status.name}" for key, one in self.scheduler.requests.items()]
        for pool in self.pools.pools:
            held += [f"{holder} holds {count} blocks" for holder, count in pool.holders().items()]
            num_quarantined = pool.count_by_state()["quarantined"]
            held += [f"{num_quarantined} blocks in quarantine"] if num_quarantined else []
        if (slots := self.pools.states) is not None and slots.num_free < slots.num_slots:
            held.append(f"{slots.num_slots - slots.num_free} slots are not free")
        return held

    def kv_of(self, group: int, tokens: Sequence[int]) -> Content:
        """Return the content of a block, or a slot, whose last token is the last one of these, in this group."""
        return *_TAGS[kinds_of(self.scenario)[group]], *tokens

    def named(self, group: int, block: int) -> str:
        """Return the name of a block, or of a slot, in messages."""
        return kinds_of(self.scenario)[group].format(block, block + 1)

    def is_free(self, group: int, block: int) -> bool:
        """Return whether nothing holds the block, or the slot of this piece."""
        slots = self.slots_of(group)
        return self.pools.pools[group].is_free(block) if slots is None else block + 1 in slots._free

    def owner_of(self, group: int, block: int) -> str | None:
        """Return the request that holds the block, or the slot of this piece, None for a free or quarantined one."""
        slots = self.slots_of(group)
        if slots is None:
            pool = self.pools.pools[group]
            holders = [holder for holder in pool.holders() if block in pool.table_of(holder)]
        else:
            holders = [holder for holder in slots.holders() if slots.table_of(holder) == [block + 1]]
        return ", ".join(holders) or None

    def slots_of(self, group: int) -> StateSlots | None:
        """Return the slots if this is their group, which is the last one; else None."""
        return self.pools.states if group == len(self.pools.pools) else None

    def _compute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        computed = ModelRunnerOutput()
        for row, (key, num_tokens) in enumerate(output.num_scheduled_tokens.items()):
            request = self.scheduler.requests[key]
            begin, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
            self.check_prefix(key, request.token_ids[:begin])
            for group, pool in enumerate(self.pools.pools):
                table = pool.table_of(key)
                for index in range(begin // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                    if table[index] == NULL_BLOCK:
                        raise LawBrokenError(f"{self.boot}: {key} is computed into the null block")
                    tokens = request.token_ids[: min(end, (index + 1) * BLOCK_SIZE)]
                    self.contents[group][table[index]] = self.kv_of(group, tokens)
            if self.pools.states is not None:
                (piece,) = self.pools.states.pieces_of(key)
                self.contents[-1][piece] = self.kv_of(-1, request.token_ids[:end])
            sampled = (
                [self.scenario.token(int(request.engine_request.request_id), end)]
                if end == request.num_tokens
                else []
            )
            computed.req_ids.append(key)
            computed.req_id_to_index[key] = row
            computed.sampled_token_ids.append(sampled)
        return computed

    def check_prefix(self, key: str, tokens: list[int]) -> None:
        """Check that the blocks that the token behind these sees, and the slot, hold the KV of exactly these tokens."""
        seen: list[tuple[int, int, int]] = []
        for group, pool in enumerate(self.pools.pools):
            table = pool.table_of(key)
            places = self.pools.groups[group].seen_blocks(len(tokens))
            seen += [(group, table[index], (index + 1) * BLOCK_SIZE) for index in places]
        if self.pools.states is not None and tokens:
            (piece,) = self.pools.states.pieces_of(key)
            seen.append((len(self.pools.pools), piece, len(tokens)))
        for group, block, end in seen:
            wanted = self.kv_of(group, tokens[:end])
            found = self.contents[group].get(block)
            if found != wanted:
                raise LawBrokenError(
                    f"misread: {self.boot} computes {key} on {self.named(group, block)}, which holds the"
                    f" KV of {found}, not of {wanted}"
                )
