"""The rules that every decision of the law keeps, whatever the load, the launcher, the routers and the users do."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from autoscaler.decision import Decision, Verb
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import PoolBounds, ScalingPolicy
from autoscaler.signals import POOLS, LoadSignals, PoolSignals, Signals
from contract.identity import Role
from tests.autoscaler.cases import GOALS, TIMING, D, P
from tests.soak_settings import machine_settings, soaked

INTERVAL = 5.0
START = TIMING.start_seconds
MAYBE_SECONDS = st.none() | st.floats(0.001, 20.0)
LOADS = st.builds(
    LoadSignals,
    arrival_rate=st.floats(0.0, 40.0),
    prompt_tokens=st.floats(0.0, 4000.0),
    uncached_prompt_tokens=st.floats(0.0, 4000.0),
    uncached_prompt_tokens_p90=st.floats(0.0, 9000.0),
    answer_tokens=st.floats(0.0, 1500.0),
    ttft_p90=MAYBE_SECONDS,
    itl_p90=MAYBE_SECONDS,
    queue_seconds=st.just(0.0) | st.floats(0.0, 30.0),
    num_waiting=st.integers(0, 200),
    step_seconds=MAYBE_SECONDS,
    prefill_seconds_per_token=MAYBE_SECONDS,
)
BOUNDS = st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([1, 1, 2])).map(
    lambda each: PoolBounds(least=each[0], most=max(1, each[0] + each[1]), devices=each[2])
)


@st.composite
def policies(draw: Callable[[st.SearchStrategy[object]], object]) -> ScalingPolicy:
    prefill = draw(BOUNDS)
    decode = draw(BOUNDS)
    assert isinstance(prefill, PoolBounds)
    assert isinstance(decode, PoolBounds)
    least = prefill.least * prefill.devices + decode.least * decode.devices
    more = draw(st.none() | st.integers(0, 8))
    assert more is None or isinstance(more, int)
    return ScalingPolicy(
        prefill=prefill, decode=decode, goals=GOALS, budget=None if more is None else max(1, least) + more
    )


@dataclass
class Pool:
    """The workers of one pool: ready ones, those that start with the time of their order, draining and changing ones."""

    ready: int = 0
    starting: list[float] = field(default_factory=list)
    draining: int = 0
    withdrawn: int = 0
    changing: int = 0

    def signals(self, now: float, in_flight: float) -> PoolSignals:
        return PoolSignals(
            num_ready=self.ready,
            starting_ages=tuple(now - since for since in self.starting),
            num_draining=self.draining + self.withdrawn,
            num_keepable=self.draining,
            num_changing=self.changing,
            num_in_flight=in_flight * self.ready,
            max_in_flight=64 * self.ready,
        )

    @property
    def existing(self) -> int:
        return self.ready + len(self.starting) + self.draining + self.withdrawn + self.changing


@dataclass(frozen=True)
class Turn:
    """The events between two decisions. fails: how many of the ordered starts do not begin. withdraw: by an operator."""

    load: LoadSignals | None
    in_flight: tuple[float, float]
    become_ready: tuple[bool, bool]
    drains_end: bool
    flips_end: bool
    fails: int
    edit: tuple[int, int]
    withdraw: tuple[bool, bool]


BOTH = st.tuples(st.booleans(), st.booleans())
TURNS = st.builds(
    Turn,
    load=st.none() | LOADS | LOADS | LOADS,
    in_flight=st.tuples(st.floats(0.0, 64.0), st.floats(0.0, 64.0)),
    become_ready=BOTH,
    drains_end=st.booleans(),
    flips_end=st.booleans(),
    fails=st.sampled_from([0, 0, 0, 1, 2]),
    edit=st.sampled_from([(0, 0)] * 8 + [(1, 0), (0, 2), (-1, 0), (0, -1)]),
    withdraw=st.sampled_from([(False, False)] * 8 + [(True, False), (False, True)]),
)


class World:
    """The pools, and what was checked of the decisions about them."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.now = 0.0
        self.memory = Memory()
        self.pools = {role: Pool(ready=policy.bounds(role).least) for role in (P, D)}
        self.drained_at: dict[Role, float] = {}
        self.flipped: tuple[float, Role] | None = None
        self.calm_since = 0.0

    def turn(self, turn: Turn, repeated: int) -> None:
        self.change(turn)
        for number in range(repeated):
            self.now += INTERVAL
            signals = Signals(
                time=self.now,
                prefill=self.pools[P].signals(self.now, turn.in_flight[0]),
                decode=self.pools[D].signals(self.now, turn.in_flight[1]),
                load=turn.load,
                num_starts=1,
            )
            decision, memory = decide(self.policy, TIMING, self.memory, signals)
            assert decide(self.policy, TIMING, self.memory, signals) == (decision, memory)
            self.memory = memory
            if turn.load is None:
                assert not decision.orders
                self.calm_since = self.now
            self.check(decision, signals)
            self.carry_out(decision, turn.fails if not number else 0)

    def change(self, turn: Turn) -> None:
        for role, is_ready, edit, withdraw in zip(
            POOLS, turn.become_ready, turn.edit, turn.withdraw, strict=True
        ):
            pool = self.pools[role]
            if is_ready:
                pool.ready += len(pool.starting)
                pool.starting.clear()
            if turn.drains_end:
                pool.draining = 0
                pool.withdrawn = 0
            if withdraw and pool.ready:
                pool.ready -= 1
                pool.withdrawn += 1
                self.calm_since = self.now
            if edit:
                self.calm_since = self.now
            pool.ready = max(0, pool.ready + edit)
        if turn.flips_end:
            for role in POOLS:
                other = self.pools[D if role is P else P]
                other.ready += self.pools[role].changing
                self.pools[role].changing = 0

    def check(self, decision: Decision, signals: Signals) -> None:
        assert "\n" not in decision.line
        for role in POOLS:
            pool = signals.pool(role)
            bounds = self.policy.bounds(role)
            given_up = [age for age in pool.starting_ages if age > 3.0 * START]
            is_starting = len(pool.starting_ages) > len(given_up)
            orders = {order.verb: order.number for order in decision.orders if order.role is role}
            assert len(orders) == sum(order.role is role for order in decision.orders)
            assert orders.get(Verb.FORGET, 0) == (len(given_up) if signals.load else 0)
            changes = set(orders) - {Verb.FORGET}
            assert len(changes) <= 1
            if is_starting or pool.num_changing:
                assert not changes
            present = pool.num_ready + len(pool.starting_ages) - len(given_up)
            if Verb.KEEP in orders:
                assert orders[Verb.KEEP] <= pool.num_keepable
            if Verb.ADD in orders:
                assert not pool.num_keepable
                assert present + pool.num_draining + orders[Verb.ADD] <= bounds.most
            if Verb.DRAIN in orders:
                self.check_drain(role, orders[Verb.DRAIN], present, pool)
            if Verb.FLIP in orders:
                self.check_flip(role, present, signals)

    def check_drain(self, role: Role, number: int, present: int, pool: PoolSignals) -> None:
        bounds = self.policy.bounds(role)
        assert number == 1
        assert not pool.num_draining
        assert present - 1 >= bounds.least
        if self.policy.budget is not None and self.is_budget_short():
            return
        assert self.now - self.drained_at.get(role, -1e9) >= 60.0
        if present <= bounds.most:
            assert self.now - self.calm_since >= 180.0 - INTERVAL

    def is_budget_short(self) -> bool:
        """Return True if workers may be taken away at once: for the budget, or because a pool lacks its least number."""
        assert self.policy.budget is not None
        devices = self.policy.num_devices({each: self.pools[each].existing for each in POOLS})
        lacks = any(
            self.pools[each].ready + len(self.pools[each].starting) < self.policy.bounds(each).least
            or any(self.now - since > 3.0 * START for since in self.pools[each].starting)
            for each in POOLS
        )
        return devices > self.policy.budget or lacks

    def check_flip(self, source: Role, present: int, signals: Signals) -> None:
        target = D if source is P else P
        assert self.policy.prefill.devices == self.policy.decode.devices
        assert present - 1 >= self.policy.bounds(source).least
        assert signals.pool(target).num_ready + 1 <= self.policy.bounds(target).most
        if self.flipped and self.flipped[1] is target:
            assert self.now - self.flipped[0] >= 30.0

    def carry_out(self, decision: Decision, fails: int) -> None:
        before = self.policy.num_devices({role: pool.existing for role, pool in self.pools.items()})
        for order in decision.orders:
            pool = self.pools[order.role]
            match order.verb:
                case Verb.ADD:
                    pool.starting += [self.now] * max(0, order.number - fails)
                case Verb.DRAIN:
                    self.drained_at[order.role] = self.now
                    pool.ready -= order.number
                    pool.draining += order.number
                case Verb.KEEP:
                    pool.ready += order.number
                    pool.draining -= order.number
                case Verb.FLIP:
                    self.flipped = (self.now, order.role)
                    pool.ready -= order.number
                    pool.changing += order.number
                case Verb.FORGET:
                    pool.starting = sorted(pool.starting)[order.number :]
            assert pool.ready >= 0
        after = self.policy.num_devices({role: pool.existing for role, pool in self.pools.items()})
        if self.policy.budget is not None:
            assert after <= max(before, self.policy.budget)


@soaked
@machine_settings(60, 1)
@given(policies(), st.lists(st.tuples(TURNS, st.sampled_from([1, 1, 2, 5, 40])), min_size=1, max_size=14))
def test_every_decision_keeps_the_rules(policy: ScalingPolicy, turns: list[tuple[Turn, int]]) -> None:
    world = World(policy)
    for turn, repeated in turns:
        world.turn(turn, repeated)


@soaked
@machine_settings(30, 1)
@given(policies(), LOADS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_a_constant_load_leads_to_numbers_within_bounds_and_budget(
    policy: ScalingPolicy, load: LoadSignals, first: tuple[int, int]
) -> None:
    """From any numbers at all, and the pools stay there: starts end at once, and latencies are not known."""
    load = replace(load, ttft_p90=None, itl_p90=None, queue_seconds=0.0, num_waiting=0, step_seconds=None)
    world = World(policy)
    for role, number in zip(POOLS, first, strict=True):
        world.pools[role].ready = number
    turn = Turn(load, (0.5, 0.5), (True, True), True, True, 0, (0, 0), (False, False))
    for _ in range(300):
        world.turn(turn, 1)
    numbers = {role: world.pools[role].existing for role in POOLS}
    for _ in range(100):
        world.turn(turn, 1)
    assert {role: world.pools[role].existing for role in POOLS} == numbers
    for role in POOLS:
        assert policy.bounds(role).least <= numbers[role] <= policy.bounds(role).most
    assert policy.budget is None or policy.num_devices(numbers) <= policy.budget
