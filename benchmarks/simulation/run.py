"""A whole simulation: arrivals, the router's policy, the law, and a launcher whose starts take time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autoscaler.decision import Decision
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import ScalingPolicy
from autoscaler.signals import POOLS, Signals
from autoscaler.timing_model import TimingModel
from benchmarks.simulation.launcher import SimulatedLauncher, Starts
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.measures import Measures
from benchmarks.simulation.pool import Listeners, SimulatedPool
from benchmarks.simulation.report import Report, report_of
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.worker import SimulatedRequest
from contract.identity import Role

INTERVAL = 5.0
"""Seconds between two decisions."""
_MOST_AFTER = 3600.0


@dataclass(kw_only=True)
class Scenario:
    """The load, the workers, and the faults of a simulation.

    truth: the times of the simulated workers. believed: those that the law calculates with; None: the same. starts: the
    default is the time of the model. is_away: returns True while no router answers. is_fixed: no law, the pools stay as they
    begin.
    """

    policy: ScalingPolicy
    truth: TimingModel
    arrivals: Sequence[Arrival]
    initial: dict[Role, int]
    duration: float
    believed: TimingModel | None = None
    starts: Starts | None = None
    is_away: Callable[[float], bool] = lambda now: False
    is_fixed: bool = False


@dataclass
class _History:
    """The events of a simulation. workers: (time, role, existing workers) at each change."""

    requests: list[SimulatedRequest] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    workers: list[tuple[float, Role, int]] = field(default_factory=list)


class Simulation:
    """Runs one scenario, once."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._timeline = Timeline()
        self._measures = Measures()
        self._history = _History()
        self._memory = Memory()
        listeners = Listeners(
            first_token=lambda request: self._measures.first_token(self._timeline.now, request),
            done=self._history.requests.append,
            empty=lambda worker: self._note(worker.role),
            prompts=lambda seconds, tokens: self._measures.prompt(self._timeline.now, seconds, tokens),
            steps=lambda seconds, tokens: self._measures.steps(self._timeline.now, seconds, tokens),
        )
        self._pool = SimulatedPool(self._timeline, scenario.truth, listeners)
        self._launcher = SimulatedLauncher(self._timeline, self._pool, scenario.truth, scenario.starts)

    def run(self) -> Report:
        """Run to the end of the scenario, and until its last answer is complete."""
        scenario = self._scenario
        for role, number in scenario.initial.items():
            for _ in range(number):
                self._launcher.attach(role)
            self._note(role)
        for number, arrival in enumerate(scenario.arrivals):
            self._timeline.at(arrival.time, self._arrival(SimulatedRequest(arrival, number)))
        if not scenario.is_fixed:
            self._timeline.at(INTERVAL, self._decide)
        self._timeline.run_until(scenario.duration)
        history = self._history
        if len(history.requests) < len(scenario.arrivals):
            self._timeline.run_until(scenario.duration + _MOST_AFTER)
        return report_of(
            scenario.policy.goals,
            scenario.duration,
            len(scenario.arrivals),
            history.requests,
            history.workers,
            history.decisions,
        )

    def _arrival(self, request: SimulatedRequest) -> Callable[[], None]:
        def arrive() -> None:
            self._measures.arrived(self._timeline.now, request.arrival)
            self._pool.arrive(request)

        return arrive

    def _decide(self) -> None:
        """Run the law once, carry its orders out, and do so again after the interval until the scenario ends."""
        scenario = self._scenario
        now = self._timeline.now
        for worker in self._pool.workers.values():
            worker.decode.advance()
        load = None
        if not scenario.is_away(now):
            load = self._measures.load(now, self._pool.num_waiting, self._pool.oldest_wait)
        signals = Signals(
            time=now,
            prefill=self._launcher.signals(Role.PREFILL),
            decode=self._launcher.signals(Role.DECODE),
            load=load,
            start_seconds=self._launcher.start_seconds,
            num_starts=self._launcher.num_starts,
        )
        timing = scenario.believed or scenario.truth
        decision, self._memory = decide(scenario.policy, timing, self._memory, signals)
        self._history.decisions.append(decision)
        for order in decision.orders:
            self._launcher.carry_out(order)
        if decision.orders:
            for role in POOLS:
                self._note(role)
        if now < scenario.duration:
            self._timeline.after(INTERVAL, self._decide)

    def _note(self, role: Role) -> None:
        """Record how many workers of a pool exist."""
        self._history.workers.append((self._timeline.now, role, self._launcher.num_existing(role)))
