"""One request whose KV is being fetched, as ``FetchTransfers`` keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contract.errors import ErrorKind, TransferError
from contract.requests import EngineRequest, ReceiveTransfer
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.digests import digest_seeds, running_digests
from kv_transfer.protocol.fetch_side import Fetch, FetchState, FetchStep
from kv_transfer.protocol.orders import Ahead, Conversion, PullJob, ReceivedStates
from kv_transfer.protocol.plan import AnnouncedBlocks, PeerTerms
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, Source, grants_within

WireKey = tuple[PeerRef, str, int]
"""The peer, the transfer id and the attempt, by which the sender's messages name a transfer."""
QUARANTINE = frozenset({FetchState.DRAINING, FetchState.QUARANTINED})


@dataclass
class IncomingTransfer:
    """One fetch, with the data that the state machine does not need: it counts this worker's blocks only.

    announced: the sender's blocks, and the terms by which they become ours. grants: of the announced ranges, by the
    sender's blocks. num_bytes: how much was ordered to be read. source: where it is read, from the first pull on. other:
    where it may be read if that fails. ahead: see ``Ahead``.
    """

    request: EngineRequest
    ref: PeerRef
    transfer_id: str
    attempt: int
    fetch: Fetch
    announced: AnnouncedBlocks
    since: float
    lease: str = ""
    num_bytes: int = 0
    grants: list[RangeGrant] = field(default_factory=list)
    read: Read = field(default_factory=Read)
    source: Source | None = None
    other: Source | None = None
    ahead: list[Ahead] = field(default_factory=list)

    @classmethod
    def of(
        cls, request: EngineRequest, transfer: ReceiveTransfer, terms: PeerTerms, now: float
    ) -> "IncomingTransfer":
        """Return the fetch of a request that has just arrived. It hashes the prompt."""
        ref = PeerRef(transfer.peer_boot_id, is_dialed=True)
        announced = _none_announced(request, terms)
        fetch = Fetch(num_blocks=announced.sections[-1].end)
        return cls(request, ref, transfer.transfer_id, request.attempt, fetch, announced, now)

    @property
    def key(self) -> str:
        """The request's key."""
        return self.request.key

    @property
    def wire_key(self) -> WireKey:
        """See ``WireKey``."""
        return self.ref, self.transfer_id, self.attempt

    def debug_state(self, now: float) -> dict[str, Any]:
        """Return the fetch as plain data."""
        return {
            "transfer_id": self.transfer_id,
            "attempt": self.attempt,
            "request": self.key,
            "state": str(self.fetch.state),
            "age_seconds": now - self.since,
            "num_blocks": self.fetch.num_blocks,
            "num_announced": self.fetch.num_announced,
            "transport": None if self.source is None else self.source.transport,
            "peer": self.ref.boot_id,
        }

    def step_of(self, message: msg.SenderMessage, now: float) -> FetchStep | None:
        """Return the fetch after a message of the sender, and what to do; None if it changes nothing.

        Keeps the grants that came with it. Raises TransferError for a message that does not fit.
        """
        match message:
            case msg.BlocksPublished():
                return self._published(message, now)
            case msg.PromptStarted():
                return fetch_side.on_started(self.fetch) if self._accepts_lease(message.lease) else None
            case msg.LayersReadable(first_block=first, num_blocks=num_blocks):
                # Layers can be read ahead only if the sender's blocks are ours, byte by byte, and of one rank.
                plan = self.announced.plan
                is_one_group = len(plan.groups) == 1 and plan.ours.state_group is None
                is_split = is_one_group and plan.is_direct and plan.ours.num_ranks == 1
                if self.lease != message.lease or not is_split:
                    return None
                self._add_grants(message.grants)
                return fetch_side.on_layers(self.fetch, first, num_blocks, message.num_bytes)
            case msg.TransferComplete(num_blocks=num_blocks):
                self.announced.check_end(num_blocks)
                return fetch_side.on_completed(self.fetch, self.fetch.num_blocks, tuple(message.first_tokens))
            case msg.TransferFailed():
                # The scheduler gets NOT_NEEDED or an ErrorKind.
                is_known = message.kind == ev.NOT_NEEDED or message.kind in set(ErrorKind)
                kind = message.kind if is_known else ErrorKind.INTERNAL
                return fetch_side.on_sender_failed(self.fetch, kind, message.message)
            case _:
                return None

    def use_terms(self, terms: PeerTerms) -> None:
        """Expect blocks on the terms of the link, which is up now."""
        if terms != self.announced.terms:
            self.announced = _none_announced(self.request, terms)

    def reserve(self, tables: Sequence[Sequence[int]], num_cached: int) -> FetchStep:
        """Read into these blocks, by the places in the prompt; the cache has those before ``num_cached`` in each group."""
        block_ids: list[int] = []
        missing = []
        for section, table in zip(self.announced.sections, tables, strict=True):
            places = section.places
            block_ids += table[places.start : places.stop]
            first, end = section.missing(num_cached)
            if first < end:
                missing.append((first, end))
        num_missing = sum(end - first for first, end in missing)
        return fetch_side.reserve(
            self.fetch, tuple(block_ids), self.fetch.num_blocks - num_missing, tuple(missing)
        )

    def job(self, pull: ev.PullBlocks, source: Source) -> PullJob:
        """Return the job that reads these blocks from ``source``, as later ones will."""
        self.source = source
        first = pull.first_block
        end = first + len(pull.block_ids)
        section = self.announced.section_of(first)
        plan = section.plan
        blocks, seeds, shares = self.announced.sources_of(first, end)
        covering = (known for known in self.ahead if known.first_block <= first and end <= known.end_block)
        ahead = next(covering, None)
        if ahead is None and pull.part is not None:
            ahead = Ahead(first, end, running_digests(source.digest, seeds))
            self.ahead.append(ahead)
        block_bytes = plan.crossing_bytes
        is_here = False
        if pull.part is None:
            self.num_bytes += len(blocks) * block_bytes
            # No other read of these blocks is open: the only posted job is this one.
            is_here = ahead is not None and ahead.has_all(block_bytes) and self.fetch.num_posted == 1
        conversion = None
        if not plan.is_direct:
            to_place = section.places.start - section.first
            offset = section.their_first - section.their_places.start
            num_tokens = section.num_tokens
            conversion = Conversion(plan, first + to_place, end + to_place, num_tokens, offset=offset)
        return PullJob(
            key=self.key,
            source=source,
            name=LeaseName(self.transfer_id, self.attempt, self.lease),
            first_block=blocks.start,
            block_ids=pull.block_ids,
            shares=shares,
            seeds=seeds,
            read=self.read,
            conversion=conversion,
            grants=tuple(grants_within(self.grants, blocks.start, blocks.stop)),
            ahead=ahead,
            part=pull.part,
            is_here=is_here,
            group=section.group,
        )

    def received_states(self) -> ReceivedStates | None:
        """Return which slot has received states; None without recurrent layers."""
        section = self.announced.sections[-1]
        if not section.is_state:
            return None
        pieces = self.fetch.block_ids[section.first : section.end]
        return ReceivedStates(section.group, pieces, self.announced.num_tokens)

    def read_again(self, retry_step: ev.RetryStep) -> Source | None:
        """Use a new ``Read`` from now on, and the other source if the step is that. Returns the source that has failed."""
        failed = self.source
        # A read that was stopped stays so, and what was read ahead may be what failed.
        self.read = Read()
        self.ahead = []
        if retry_step is ev.RetryStep.OTHER_TRANSPORT:
            self.source = self.other
        return failed

    def _published(self, message: msg.BlocksPublished, now: float) -> FetchStep | None:
        if not self._accepts_lease(message.lease):
            raise TransferError(f"the sender changed the lease of transfer {self.transfer_id} in the middle")
        self._add_grants(message.grants)
        ours = self.announced.add(message.first_block, message.digests, message.other_digests)
        return fetch_side.on_announced(self.fetch, ours.start, len(ours), now) if ours else None

    def _accepts_lease(self, lease: str) -> bool:
        """Check the lease of a message; remember the first one seen."""
        self.lease = self.lease or lease
        return self.lease == lease

    def _add_grants(self, grants: list[RangeGrant]) -> None:
        # A grant that came ahead with the layers is repeated with the announcement.
        self.grants += [grant for grant in grants if grant not in self.grants]


def _none_announced(request: EngineRequest, terms: PeerTerms) -> AnnouncedBlocks:
    seeds = digest_seeds(request, terms.model_fingerprint, terms.plan.theirs)
    return AnnouncedBlocks(terms, len(request.prompt_token_ids), seeds)
