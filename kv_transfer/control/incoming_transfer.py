"""One request whose KV is being fetched, as ``FetchTransfers`` keeps it."""

from dataclasses import dataclass, field
from typing import Any

from contract.errors import InternalError
from contract.requests import EngineRequest
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import RunningDigests
from kv_transfer.protocol.events import RetryStep
from kv_transfer.protocol.fetch_side import Fetch
from kv_transfer.protocol.orders import Ahead, Conversion, PullJob
from kv_transfer.protocol.plan import AnnouncedBlocks, SourceRange
from kv_transfer.protocol.reads import BlockPart, LeaseName, RangeGrant, Read, Source, grants_within

WireKey = tuple[PeerRef, str, int]
"""How the sender's words name it."""


@dataclass
class IncomingTransfer:
    """One fetch with what the pure machine does not need to know: that counts this worker's blocks only.

    seeds: of this worker's blocks. announced: what the sender announced by its own, where it cuts the prompt otherwise.
    grants: what came with the announced ranges, by the sender's blocks. num_bytes: what was ordered to cross.
    source: where it is read, from the first pull on. other: where it may be read if that fails. ahead: see ``Ahead``.
    """

    request: EngineRequest
    ref: PeerRef
    transfer_id: str
    attempt: int
    fetch: Fetch
    seeds: tuple[int, ...]
    since: float
    lease: str = ""
    announced: AnnouncedBlocks | None = None
    num_bytes: int = 0
    grants: list[RangeGrant] = field(default_factory=list)
    read: Read = field(default_factory=Read)
    source: Source | None = None
    other: Source | None = None
    ahead: list[Ahead] = field(default_factory=list)

    @property
    def key(self) -> str:
        """The request's."""
        return self.request.key

    @property
    def wire_key(self) -> WireKey:
        """See ``WireKey``."""
        return self.ref, self.transfer_id, self.attempt

    @property
    def lease_name(self) -> LeaseName:
        """What is read."""
        return LeaseName(self.transfer_id, self.attempt, self.lease)

    def debug_state(self, now: float) -> dict[str, Any]:
        """As plain data."""
        return {
            "transfer_id": self.transfer_id,
            "attempt": self.attempt,
            "request": self.key,
            "state": str(self.fetch.state),
            "age_seconds": now - self.since,
            "num_blocks": self.fetch.num_blocks,
            "num_announced": len(self.fetch.digests),
            "num_landed": self.fetch.num_landed,
            "transport": None if self.source is None else self.source.transport,
            "rungs": [str(retry_step) for retry_step in self.fetch.retry_steps],
            "peer": self.ref.boot_id,
        }

    def hears_of(self, lease: str) -> bool:
        """The sender's word about what it lends under; False where it has said another before."""
        self.lease = self.lease or lease
        return self.lease == lease

    def add_grants(self, grants: list[RangeGrant]) -> None:
        """Those that came ahead come once more with the announcement."""
        self.grants += [grant for grant in grants if grant not in self.grants]

    def job(self, action: ev.PullBlocks | ev.ReadAhead, block_bytes: int) -> PullJob:
        """What is to be read now that ``source`` is known. block_bytes: of this worker's blocks."""
        return (
            self._pull_job(action, block_bytes)
            if isinstance(action, ev.PullBlocks)
            else self._ahead_job(action)
        )

    def read_again(self, retry_step: RetryStep) -> Source | None:
        """Its next pulls go by a ``Read`` of their own, and by this step. Returns the source that has failed."""
        failed = self.source
        self.read = Read()
        self.ahead = []
        if retry_step is RetryStep.OTHER_TRANSPORT:
            self.source = self.other
        return failed

    def _pull_job(self, pull: ev.PullBlocks, block_bytes: int) -> PullJob:
        end = pull.first_block + len(pull.block_ids)
        blocks = SourceRange(pull.first_block, pull.digests, self.seeds[pull.first_block : end])
        conversion: Conversion | None = None
        if (announced := self.announced) is not None:
            blocks = announced.sources_of(pull.first_block, end)
            block_bytes = announced.plan.crossing_bytes
            if not announced.plan.is_direct:
                conversion = Conversion(announced.plan, pull.first_block, end, announced.num_tokens)
        ahead = None if announced is not None else self._ahead_of(pull.first_block, end)
        self.num_bytes += len(blocks.digests) * block_bytes
        return PullJob(
            key=self.key,
            source=self._known_source,
            name=self.lease_name,
            first_block=blocks.first_block,
            block_ids=pull.block_ids,
            digests=blocks.digests,
            seeds=blocks.seeds,
            read=self.read,
            conversion=conversion,
            grants=tuple(grants_within(self.grants, blocks.first_block, blocks.end_block)),
            others=blocks.others,
            ahead=ahead,
            is_here=ahead is not None and ahead.has_all(block_bytes) and self.fetch.num_posted == 1,
        )

    def _ahead_job(self, action: ev.ReadAhead) -> PullJob:
        first = action.first_block
        end = action.first_block + len(action.block_ids)
        known = self._ahead_of(first, end)
        if known is None:
            known = Ahead(first, end, RunningDigests(self.seeds[first:end]))
            self.ahead.append(known)
        return PullJob(
            key=self.key,
            source=self._known_source,
            name=self.lease_name,
            first_block=first,
            block_ids=action.block_ids,
            digests=(),
            seeds=(),
            read=self.read,
            grants=tuple(grants_within(self.grants, first, end)),
            ahead=known,
            part=BlockPart(action.start_byte, action.end_byte - action.start_byte),
        )

    @property
    def _known_source(self) -> Source:
        if self.source is None:
            raise InternalError(f"request {self.key} is read before it is known where")
        return self.source

    def _ahead_of(self, first_block: int, end_block: int) -> Ahead | None:
        covering = (
            one for one in self.ahead if one.first_block <= first_block and end_block <= one.end_block
        )
        return next(covering, None)
