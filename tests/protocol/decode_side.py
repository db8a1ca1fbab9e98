"""A decode worker of the explored world: production's scheduler and ``FetchTransfers``, and its reads, moved by hand."""

from contract.errors import ErrorKind
from engine.scheduling.requests.finish import Finish, RequestStatus
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.counters import Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.events import RetryStep
from kv_transfer.protocol.handshake import Session
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import Read, ReadRequest, Source
from kv_transfer.transports.choosing import Alternatives
from tests.protocol.engine_side import STATES, Connector, Content, EngineSide, no_time
from tests.protocol.frames import frame_of, message_of
from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError, Sink

CORRUPT: Content = (-1,)
HALF = -2
"""Behind the content of a block of which only the first layers are there."""
DECODE_BUDGET = 8
_TRANSPORTS = ("shm", "tcp")
_WAITING = RequestStatus.WAITING_FOR_REMOTE_KVS


class Reading:
    """A posted pull. stage: posted → copying → copied → landed.

    source_group, source_blocks: the group and the blocks that it reads, once begun.
    """

    def __init__(self, job: PullJob, read: Read) -> None:
        self.key, self.name, self.first_block, self.group = job.key, job.name, job.first_block, job.group
        self.block_ids, self.seeds = job.block_ids, job.seeds
        self.digests = job.shares[0].digests if job.shares else ()
        self.read = read
        self.part, self.ahead = job.part, job.ahead
        self.lane = lane_of(job.source)
        self.stage = "posted"
        self.source_group = 0
        self.source_blocks: tuple[int, ...] = ()
        self.num_copied = 0

    @property
    def request(self) -> ReadRequest:
        return ReadRequest(self.name, self.first_block, len(self.block_ids), group=self.group)


def lane_of(source: Source) -> str:
    """Return the sender's boot id, with the transport if it is not the first one."""
    return source.boot_id + ("" if source.transport == _TRANSPORTS[0] else f"/{source.transport}")


def sender_of(lane: str) -> str:
    """The boot id."""
    return lane.partition("/")[0]


class Committing:
    """A posted commit."""

    def __init__(self, job: CommitJob) -> None:
        self.key, self.block_ids, self.read = job.key, job.block_ids, job.read


class DecodeSide(EngineSide):
    """Owns one incarnation of a decode worker. lanes: posted reads by ``lane_of`` their source; severed: lanes that fail."""

    def __init__(self, scenario: Scenario, sink: Sink, boot: str) -> None:
        super().__init__(scenario, sink, boot, scenario.decode_blocks, DECODE_BUDGET)
        self.lanes: dict[str, list[Reading]] = {}
        self.severed: set[str] = set()
        self.commits: list[Committing] = []
        self.transfers = scenario.rules.fetch_transfers(
            self.make_worker(),
            FetchPorts(
                dial=lambda target, message: sink.ask("dial", target.boot_id, frame_of(message)),
                post=lambda ref, message: sink.ask("say", ref.boot_id, frame_of(message)),
                pull=lambda job: sink.ask("pull", job),
                commit=lambda job: sink.ask("commit", job),
                choose=lambda session, _told: _sources_of(session.boot_id, 1)[0],
                alternatives=Alternatives(Counters()),
            ),
            no_time,
        )
        connector = Connector(None, self.transfers)
        self.scheduler = self.make_scheduler(scenario.rules.decode_stages, connector)

    def prepare(self) -> None:
        """Do nothing before a call."""

    def carry_out(self) -> None:
        """Keep the jobs that the transfers posted here; send their messages out."""
        for effect in self.sink.take():
            match effect:
                case ("pull", PullJob() as job):
                    self._post(Reading(job, job.read))
                case ("commit", CommitJob() as job):
                    self.commits.append(Committing(job))
                case _:
                    self.sink.ask(*effect)

    def hear(self, peer: str, frame: bytes) -> None:
        """Take a frame of a prefill worker; see ``ControlHalf.link_message``."""
        message = message_of(frame)
        assert isinstance(message, msg.SenderMessage)
        self.transfers.on_message(PeerRef(peer, is_dialed=True), message)

    def link_up(self, peer: str) -> None:
        """Take the session of the dialed link."""
        if self.scenario.num_transports > 1:
            self.transfers._effects.alternatives.begin(_sources_of(peer, self.scenario.num_transports))
        self.transfers.link_up(PeerRef(peer, is_dialed=True), Session("p", peer, "prefill", 3.0, (), peer))

    def link_down(self, peer: str) -> None:
        """Take the end of a link, or the failure to dial it."""
        source = self.transfers.link_down(PeerRef(peer, is_dialed=True), ErrorKind.WORKER_LOST, "gone")
        if source is not None:
            self.transfers._effects.alternatives.end(source)

    def run_out_of_time(self) -> None:
        """End the waits for KV: ``remote_kv_timeout_seconds`` are over."""
        late = [one for one in self.scheduler.requests.values() if one.status is _WAITING]
        for request in late:
            self.scheduler.live.finish(request, Finish.with_error(ErrorKind.DEADLINE, "no KV came in time"))

    def begin(self, peer: str, source_group: int, source_blocks: tuple[int, ...]) -> None:
        """Begin a read whose lease was valid before the first byte."""
        reading = self.lanes[peer][0]
        reading.source_group, reading.source_blocks, reading.stage = source_group, source_blocks, "copying"

    def take_block(self, peer: str, content: Content | None) -> None:
        """Land the bytes of the next block."""
        reading = self.lanes[peer][0]
        block = reading.block_ids[reading.num_copied]
        self._check_may_write(reading.key, reading.group, block)
        self.contents[reading.group][block] = self._joined(
            reading, block, CORRUPT if content is None else content
        )
        reading.num_copied += 1
        if reading.num_copied == len(reading.block_ids):
            reading.stage = "copied"

    def land(self, peer: str) -> None:
        """Land a read whose lease was valid after the last byte."""
        reading = self.lanes[peer][0]
        if reading.part is not None and reading.ahead is not None:
            self.lanes[peer].pop(0)
            reading.ahead.num_read += reading.part.num_bytes
            reading.ahead.num_digested = reading.ahead.num_read
            self.transfers.fetch_event(reading.key, ev.ReadAheadOver((0.0, 0.0)))
            return
        reading.stage = "landed"
        self.transfers.fetch_event(reading.key, ev.PieceLanded(len(reading.block_ids), 0.0, 0.0))

    def end(self, peer: str, why: str) -> None:
        """End a read without success."""
        reading = self.lanes[peer].pop(0)
        may_heal = why != "the lease is over"
        failed: ev.FetchEvent = ev.JobFailed(ErrorKind.TRANSFER_FAILED, why, may_heal)
        if reading.part is not None:
            failed = ev.ReadAheadOver(None)
        self.transfers.fetch_event(reading.key, ev.JobStopped() if why == "stopped" else failed)

    def sever(self, lane: str) -> None:
        """Break every read over this transport, though not the control link."""
        self.severed.add(lane)

    def verify(self, peer: str) -> None:
        """Compare the digests of what has landed."""
        reading = self.lanes[peer][0]
        if reading.read.is_stopped:
            self.end(peer, "stopped")
            return
        found = [
            self.sink.digest(self.contents[reading.group].get(block), seed)
            for block, seed in zip(reading.block_ids, reading.seeds, strict=True)
        ]
        if self.scenario.checks_digests and found != list(reading.digests):
            self.end(peer, "a digest does not match")
            return
        self.lanes[peer].pop(0)
        self.transfers.fetch_event(reading.key, ev.PieceVerified(len(reading.block_ids), 0.0))

    def commit(self) -> None:
        """Make verified blocks visible."""
        job = self.commits.pop(0)
        request = self.scheduler.requests.get(job.key)
        if job.read.is_stopped or request is None:
            self.transfers.fetch_event(job.key, ev.JobStopped())
            return
        self.check_prefix(job.key, request.token_ids[: request.num_prompt_tokens])
        self.transfers.fetch_event(job.key, ev.CommitDone())

    def _joined(self, reading: Reading, block: int, content: Content) -> Content:
        """Return a block's content after these bytes have landed; halves of two contents make none."""
        if reading.part is not None:
            return (*content, HALF)
        if reading.ahead is None or not reading.ahead.num_read:
            return content
        return content if self.contents[reading.group].get(block) == (*content, HALF) else CORRUPT

    def _post(self, reading: Reading) -> None:
        before = self.lanes.get(reading.lane, [])
        one_after_the_other = {id(each) for each in before if each.part is not None}
        for posted in (each for lane in self.lanes.values() for each in lane):
            if id(posted) in one_after_the_other or posted.group != reading.group:
                continue
            for block in set(posted.block_ids).intersection(reading.block_ids):
                raise LawBrokenError(
                    f"{self.boot}: {self.named(reading.group, block)} is read into twice at once, for {reading.key}"
                )
        self.lanes.setdefault(reading.lane, []).append(reading)

    def _check_may_write(self, key: str, group: int, block: int) -> None:
        owner = self.owner_of(group, block)
        writes = f"{self.boot}: a read for {key} writes into {self.named(group, block)}"
        if (slots := self.slots_of(group)) is not None:
            is_quarantined = slots._quarantined.get(key) == block + 1
        else:
            pool = self.pools.pools[group]
            is_quarantined = block in pool._quarantined.get(key, ())
            if pool._index.content_of(block):
                raise LawBrokenError(f"{writes}, which is visible")
        if owner != key and not is_quarantined:
            raise LawBrokenError(f"{writes}, which is {'held by ' + owner if owner else 'free'}")

    def tidy(self) -> None:
        """Forget idle lanes."""
        super().tidy()
        self.lanes = {peer: lane for peer, lane in sorted(self.lanes.items()) if lane}
        block_bytes = self.pools.groups[0].layout.block_bytes  # the other group has as many layers
        if self.pools.states is not None:
            block_bytes = max(block_bytes, STATES.slot_bytes)
        for incoming in self.transfers._incoming:
            self.sink.climbed.add(incoming.fetch.retry_steps)
            if incoming.num_bytes > (1 + len(RetryStep)) * incoming.fetch.num_blocks * block_bytes:
                raise LawBrokenError(f"{self.boot}: what {incoming.key} lacks is read again and again")

    def what_is_held(self) -> list[str]:
        """Return the fetches and jobs too."""
        held = [
            f"fetch of {one['transfer_id']} is {one['state']}"
            for one in self.transfers.debug_state()["fetches"]
        ]
        jobs = [reading.key for lane in self.lanes.values() for reading in lane]
        jobs += [job.key for job in self.commits]
        return super().what_is_held() + held + [f"a job of {key} is not terminal" for key in jobs]


def _sources_of(peer: str, num_transports: int) -> list[Source]:
    """Return the sources by which blocks of this incarnation can be read, best first."""
    return [Source("p", peer, "", peer, name) for name in _TRANSPORTS[:num_transports]]
