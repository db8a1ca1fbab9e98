"""Leases and sessions against a model: readers, growing leases, revocations (repeated ones too), new names."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.layout import KVLayout
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.leases import LeaseBook, Sessions
from tests.kv_transfer.fakes import ByteMemory
from tests.soak_settings import machine_settings, soaked

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=1, dtype="float32")
NAMES = st.sampled_from([LeaseName("t", 0, "a"), LeaseName("t", 0, "a"), LeaseName("t", 1, "b")])
TOKENS = st.sampled_from(["x", "y", "z"])


@dataclass
class ModelLease:
    """The expected state of a lease. num_revokes: those that wait for its readers."""

    block_ids: list[int] = field(default_factory=list)
    num_readers: int = 0
    num_revokes: int = 0


@soaked
class LeaseMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.idle: list[LeaseName] = []
        self.expected_idle: list[LeaseName] = []
        self.book, memory = LeaseBook(self.idle.append), ByteMemory(LAYOUT, 16)
        for block_id in range(16):
            memory.fill(block_id, bytes([block_id]))
        self.book.start(memory)
        self.leases: dict[LeaseName, ModelLease] = {}
        self.readers: list[tuple[LeaseName, AbstractContextManager[Sequence[memoryview]]]] = []
        self.sessions, self.ended = Sessions(), list[str]()
        self.sessions.listen(self.ended.append)
        self.live: set[str] = set()
        self.num_ended = 0

    @rule(name=NAMES, block_ids=st.lists(st.integers(0, 15), min_size=1, max_size=3))
    def extend(self, name: LeaseName, block_ids: list[int]) -> None:
        lease = self.leases.setdefault(name, ModelLease())
        self.book.extend(name, block_ids, len(lease.block_ids))
        lease.block_ids.extend(block_ids)

    @rule(name=NAMES, first_block=st.integers(1, 3))
    def extend_behind_the_end(self, name: LeaseName, first_block: int) -> None:
        """A range that was digested when its lease was over."""
        if name not in self.leases:
            self.book.extend(name, [0], first_block)
            self.check(name)

    @rule(name=NAMES, first_block=st.sampled_from([0, 0, 0, 0, 1, -1, 9]), num_blocks=st.integers(1, 3))
    def read(self, name: LeaseName, first_block: int, num_blocks: int) -> None:
        lease, end_block = self.leases.get(name), first_block + num_blocks
        reading = self.book.reading(ReadRequest(name, first_block, num_blocks))
        is_valid = lease is not None and not lease.num_revokes
        if lease is None or not is_valid or first_block < 0 or end_block > len(lease.block_ids):
            with pytest.raises(StaleLeaseError):
                reading.__enter__()
            return
        views = reading.__enter__()
        assert [view[0] for view in views] == lease.block_ids[first_block:end_block]
        lease.num_readers += 1
        self.readers.append((name, reading))

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 9), is_broken=st.booleans())
    def stop_reading(self, pick: int, is_broken: bool) -> None:
        """Normally, or by the exception that a broken connection raises."""
        name, reading = self.readers.pop(pick % len(self.readers))
        lease = self.leases[name]
        lease.num_readers -= 1
        if lease.num_readers == 0 and lease.num_revokes:
            self.expected_idle += [name] * lease.num_revokes
            del self.leases[name]
        if is_broken:
            error = OSError("broken")
            assert not reading.__exit__(OSError, error, None)
        else:
            reading.__exit__(None, None, None)

    @rule(name=NAMES)
    def revoke(self, name: LeaseName) -> None:
        lease = self.leases.get(name)
        if lease is not None and lease.num_readers:
            lease.num_revokes += 1
        else:
            self.leases.pop(name, None)
            self.expected_idle.append(name)
        self.book.revoke(name)

    @precondition(lambda self: self.readers)
    @rule(pick=st.integers(0, 9))
    def revoke_amid_reads(self, pick: int) -> None:
        """No read starts any more, of what others still read."""
        name, _ = self.readers[pick % len(self.readers)]
        self.revoke(name)
        self.check(name)
        self.read(name, 0, 1)

    @rule(token=TOKENS)
    def begin_session(self, token: str) -> None:
        self.sessions.begin(token)
        self.live.add(token)

    @rule(token=TOKENS)
    def end_session(self, token: str) -> None:
        self.sessions.end(token)
        self.live.discard(token)
        self.num_ended += 1

    @rule(name=NAMES)
    def check(self, name: LeaseName) -> None:
        lease = self.leases.get(name)
        if lease is not None and not lease.num_revokes:
            self.book.check(name)
        else:
            with pytest.raises(StaleLeaseError):
                self.book.check(name)

    @invariant()
    def agrees(self) -> None:
        assert self.idle == self.expected_idle
        assert {token for token in ("x", "y", "z") if token in self.sessions} == self.live
        assert len(self.ended) == self.num_ended

    def teardown(self) -> None:
        while self.readers:
            self.stop_reading(0, False)
        self.agrees()


TestLeases = LeaseMachine.TestCase
TestLeases.settings = machine_settings(100, 30)
