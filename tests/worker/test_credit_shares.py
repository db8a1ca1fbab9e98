"""Several routers share one worker's credit over links that delay every message: together they never exceed it."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contract.membership import Credit, CreditUse
from tests.soak_settings import machine_settings, soaked
from wire.messages import BadNumberError
from worker.credit_shares import CreditShares, Use

MAX_ROUTERS = 6
TOKENS_OF_LEG = 10
ROUNDS = 60


@dataclass
class Router:
    """A router as the worker's credit concerns it: messages in both directions, its limit, and the legs that it holds."""

    credits: deque[Credit] = field(default_factory=deque)
    reports: deque[CreditUse] = field(default_factory=deque)
    limit: int = 0
    num_legs: int = 0

    def receive(self) -> None:
        """Take the next credit and report what is held."""
        credit = self.credits.popleft()
        self.limit = credit.max_requests
        self.reports.append(
            CreditUse(
                number=credit.number, num_requests=self.num_legs, num_tokens=self.num_legs * TOKENS_OF_LEG
            )
        )

    def bind(self, num_legs: int) -> None:
        """Bind legs as far as the limit allows."""
        self.num_legs = max(self.num_legs, min(self.num_legs + num_legs, self.limit))


class Sharing:
    """A worker's credit and its routers, by session."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.routers: dict[str, Router] = {}
        self.shares = CreditShares(self.credit(total))
        self.num_opened = 0

    @staticmethod
    def credit(total: int) -> Credit:
        return Credit(max_requests=total, max_tokens=total * TOKENS_OF_LEG)

    @property
    def num_legs(self) -> int:
        return sum(router.num_legs for router in self.routers.values())

    def used(self) -> dict[str, Use]:
        return {
            name: Use(router.num_legs, router.num_legs * TOKENS_OF_LEG)
            for name, router in self.routers.items()
        }

    def send(self, credits: Mapping[str, Credit]) -> None:
        for name, credit in credits.items():
            self.routers[name].credits.append(credit)

    def open(self) -> str:
        self.num_opened += 1
        name = f"session {self.num_opened}"
        self.routers[name] = Router()
        self.send(self.shares.open(name, self.credit(self.total), self.used()))
        return name

    def close(self, name: str) -> None:
        del self.routers[name]
        self.send(self.shares.close(name, self.used()))

    def set_total(self, total: int) -> None:
        self.total = total
        self.send(self.shares.set_total(self.credit(total), self.used()))

    def plan(self) -> None:
        self.send(self.shares.plan(self.used()))

    def report(self, name: str) -> None:
        self.send(self.shares.report(name, self.routers[name].reports.popleft()))

    def deliver_all(self) -> None:
        while any(router.credits or router.reports for router in self.routers.values()):
            for name, router in self.routers.items():
                while router.credits:
                    router.receive()
                while router.reports:
                    self.report(name)


def test_a_report_of_a_credit_that_was_not_sent_is_refused() -> None:
    """A4: such a router would never count as one that has answered."""
    sharing = Sharing(8)
    name = sharing.open()
    with pytest.raises(BadNumberError, match=r"CreditUse\.number is 2; the last credit has 1"):
        sharing.shares.report(name, CreditUse(number=2))


@soaked
class CreditMachine(RuleBasedStateMachine):
    """Any order of messages, legs, routers and totals."""

    def __init__(self) -> None:
        super().__init__()
        self.it = Sharing(0)
        self.most = 0

    def some(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from(sorted(self.it.routers))))

    @initialize(total=st.integers(0, 40))
    def begin(self, total: int) -> None:
        self.it = Sharing(total)
        self.most = total

    @precondition(lambda self: len(self.it.routers) < MAX_ROUTERS)
    @rule()
    def open(self) -> None:
        self.it.open()

    @precondition(lambda self: self.it.routers)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.it.close(self.some(data))

    @rule(total=st.integers(0, 40))
    def change_the_total(self, total: int) -> None:
        self.most = max(total, self.it.shares.num_committed.num_requests)
        self.it.set_total(total)

    @rule()
    def plan(self) -> None:
        self.it.plan()

    @precondition(lambda self: any(router.credits for router in self.it.routers.values()))
    @rule(data=st.data())
    def a_credit_arrives(self, data: st.DataObject) -> None:
        having = [router for router in self.it.routers.values() if router.credits]
        data.draw(st.sampled_from(having)).receive()

    @precondition(lambda self: any(router.reports for router in self.it.routers.values()))
    @rule(data=st.data())
    def a_report_arrives(self, data: st.DataObject) -> None:
        having = [name for name, router in self.it.routers.items() if router.reports]
        self.it.report(data.draw(st.sampled_from(having)))

    @precondition(lambda self: self.it.routers)
    @rule(data=st.data(), num_legs=st.integers(1, 40))
    def legs_begin(self, data: st.DataObject, num_legs: int) -> None:
        self.it.routers[self.some(data)].bind(num_legs)

    @precondition(lambda self: self.it.num_legs)
    @rule(data=st.data())
    def legs_end(self, data: st.DataObject) -> None:
        router = self.it.routers[self.some(data)]
        router.num_legs -= data.draw(st.integers(0, router.num_legs))

    @precondition(lambda self: self.it.routers)
    @rule(data=st.data())
    def one_router_becomes_busy(self, data: st.DataObject) -> None:
        """It gets all but what the others need to begin at once."""
        busy = self.it.routers[self.some(data)]
        for router in self.it.routers.values():
            router.num_legs = 0
        for _ in range(ROUNDS):
            self.it.deliver_all()
            busy.bind(self.it.total)
            self.it.plan()
        self.it.deliver_all()
        num_routers = len(self.it.routers)
        if num_routers == 1:
            assert busy.limit == self.it.total
        elif self.it.total >= num_routers:
            assert busy.limit >= (self.it.total - num_routers) * 17 // 20 + 1
            assert all(router.limit for router in self.it.routers.values())

    @invariant()
    def the_legs_are_within_the_credit(self) -> None:
        committed = self.it.shares.num_committed.num_requests
        self.most = max(self.it.total, min(self.most, committed))
        assert self.it.num_legs <= committed <= self.most

    @invariant()
    def a_share_sinks_only_as_far_as_it_is_unused(self) -> None:
        for name, router in self.it.routers.items():
            assert self.it.shares._requests.most_of(name) >= max(router.num_legs, router.limit)

    @invariant()
    def no_router_has_more_than_it_was_given(self) -> None:
        assert self.it.shares.num_overdrawn == 0


CreditMachine.TestCase.settings = machine_settings(200, 60)
test_routers_share_a_credit = CreditMachine.TestCase


def sharing(total: int, num_routers: int) -> Sharing:
    it = Sharing(total)
    for _ in range(num_routers):
        it.open()
    it.deliver_all()
    return it


def limits(it: Sharing) -> list[int]:
    return [router.limit for router in it.routers.values()]


def test_one_router_has_the_whole_credit() -> None:
    it = Sharing(17)
    name = it.open()
    assert it.routers[name].credits[0].max_requests == 17
    assert it.routers[name].credits[0].max_tokens == 170


def test_idle_routers_have_equal_shares() -> None:
    assert limits(sharing(64, 2)) == [32, 32]
    assert sorted(limits(sharing(10, 3))) == [3, 3, 4]


def test_a_router_that_comes_late_gets_credit_as_soon_as_legs_end() -> None:
    it = sharing(8, 1)
    (first,) = it.routers.values()
    first.bind(8)
    late = it.routers[it.open()]
    it.deliver_all()
    assert late.limit == 0
    first.num_legs -= 3
    first.bind(8)
    assert first.num_legs == 7
    it.plan()
    it.deliver_all()
    assert late.limit == 1


def test_a_router_that_was_idle_gets_its_part_from_a_busy_one() -> None:
    """Both have more to do than the worker takes: in the end each has half of the credit."""
    it = sharing(64, 2)
    busy, other = it.routers.values()
    for _ in range(ROUNDS):
        busy.num_legs = 0
        busy.bind(64)
        it.plan()
        it.deliver_all()
    assert busy.limit >= 58
    for _ in range(ROUNDS):
        for router in (busy, other):
            router.num_legs -= router.num_legs // 2
            router.bind(64)
        it.plan()
        it.deliver_all()
    assert abs(busy.limit - other.limit) <= 10


def test_the_credit_of_a_lost_router_goes_to_the_others_at_once() -> None:
    it = sharing(64, 2)
    lost, other = it.routers
    it.routers[lost].bind(64)
    it.close(lost)
    it.deliver_all()
    assert it.routers[other].limit == 64


def test_a_credit_of_nothing_leaves_nobody_anything() -> None:
    """A worker that drains offers nothing to any router, and everything again when the drain is taken back."""
    it = sharing(64, 3)
    it.set_total(0)
    it.deliver_all()
    assert limits(it) == [0, 0, 0]
    it.set_total(64)
    it.deliver_all()
    assert sum(limits(it)) == 64


@pytest.mark.parametrize("num_routers", [3, 5])
def test_more_routers_than_credit_take_turns(num_routers: int) -> None:
    """None of them waits for ever, though others always have requests."""
    it = sharing(2, num_routers)
    num_turns = dict.fromkeys(it.routers, 0)
    for _ in range(10 * num_routers):
        for name, router in it.routers.items():
            router.num_legs = 0
            router.bind(2)
            num_turns[name] += router.num_legs
        it.plan()
        it.deliver_all()
    assert min(num_turns.values()) >= 2


def test_a_steady_load_causes_no_messages() -> None:
    it = sharing(64, 2)
    for num_legs in (20, 22, 19, 21):
        for router in it.routers.values():
            router.num_legs = num_legs
        it.plan()
        assert not any(router.credits for router in it.routers.values())
