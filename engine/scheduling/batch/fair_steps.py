"""A limit on the answers of one client in a step, while other clients' answers are computed too.

Every request of a batch waits for the whole step. If each row makes a step longer (on a processor, or with long
contexts), a client with a hundred answers makes each token of all other clients many times slower. So a step holds no more
rows of one client than make it ``max_key_slowdown`` times as long as a step of a few rows; ``RowLimit`` finds their number
by measuring steps. If rows are almost free, as on a GPU that is not full, all of them fit. Rows that are left out take
turns. Prompts are limited likewise: the client that was served least starts next, and no client starts more of them in a
step than make it that much longer.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from itertools import islice
from math import inf

from engine.outputs import SchedulerOutput
from engine.scheduling.batch.policy import Stage
from engine.scheduling.requests.queues import PriorityQueue
from engine.scheduling.requests.request import Request

MIN_ROWS = 2
"""Rows that every client gets, whatever they cost."""
_GROWTH = 1.1
_CUT = 0.9
# Weights of a new length of a short step, if longer and if shorter: a busy moment must not become the measure.
_UP = 0.02
_DOWN = 0.3
RECENT_SECONDS = 1.0
"""The time after its last step in which other clients must leave room for a client."""
# Length of the pause between steps of one limited client's answers alone, in steps.
_PAUSE = 3


class RowLimit:
    """A limit that grows while steps stay short, and shrinks when they get too long, like TCP's window.

    The cost of a row is not constant (contexts grow, processors get busy), so the limit is found by trial. Used from one
    thread.

    max_slowdown: how many times as long as a step of a few rows a step may take.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._rows = 2.0 * MIN_ROWS
        self._short_seconds = 0.0
        self._seconds = 0.0

    @property
    def rows(self) -> int:
        """The limit."""
        return round(self._rows)

    def note(self, num_rows: int, largest: int | None, seconds: float) -> None:
        """Record a measured step. largest: rows of the client with most; None if it was the only client."""
        # The measure is a step of few rows: what a client with few answers would have without the others.
        if num_rows <= MIN_ROWS + 1:
            weight = _DOWN if seconds < self._short_seconds else _UP
            self._short_seconds = _smoothed(self._short_seconds, seconds, weight)
        if largest is None or not self._short_seconds:
            return
        self._seconds = _smoothed(self._seconds, seconds, 0.5)
        if self._seconds > self._max_slowdown * self._short_seconds:
            self._rows = max(MIN_ROWS, _CUT * min(self._rows, largest))
        elif largest >= self.rows:  # a limit that no client has reached was not tried
            self._rows *= _GROWTH


def _smoothed(known: float, new: float, weight: float) -> float:
    return known + weight * (new - known) if known else new


class FairStep:
    """The limits of one step that is being planned.

    limit: requests that one client may start; None while there is only one client. sitting_out: keys of the answers that
    are left out. served: prompt tokens that were started, by client.
    """

    def __init__(self, limit: int | None, sitting_out: set[str], served: dict[str, float]) -> None:
        self.limit = limit
        self.sitting_out = sitting_out
        self.num_started: Counter[str] = Counter()
        self._served = served

    def next_of(self, queue: PriorityQueue, stage: Stage = Stage.MIXED) -> Request | None:
        """Return the request that starts next: of the client that was served least and may start another one."""
        limit = self.limit
        if limit is None:
            return next(filter(stage.holds, queue), None)
        clients = [client for client in queue.clients if self.num_started[client] < limit]
        firsts = [one for client in clients for one in islice(filter(stage.holds, queue.of(client)), 1)]
        return min(
            firsts, key=lambda one: (self._served[one.engine_request.tenant], one.precedence), default=None
        )

    def on_start(self, request: Request, num_tokens: int) -> None:
        """Record that a request starts with ``num_tokens`` in this step."""
        self.num_started[request.engine_request.tenant] += 1
        if self.limit is not None:
            self._served[request.engine_request.tenant] += num_tokens


class Turns:
    """Chooses the answers that sit out a step: of each client those that had a turn last."""

    def __init__(self) -> None:
        self._last_turns: dict[str, int] = {}
        self._num_steps = 0

    def choose(self, running: PriorityQueue, limit: int) -> set[str]:
        """Give a turn to ``limit`` answers of each client; return the keys of the others."""
        # New answers wait like those that had the last turn, or they would displace all others.
        latest = self._num_steps
        self._num_steps += 1
        self._last_turns = {
            request.key: self._last_turns.get(request.key, latest) for request in running.requests
        }
        sitting_out: set[str] = set()
        for client in running.clients:
            own = [request for request in running.of(client) if request.is_decoding]
            own.sort(key=lambda request: (self._last_turns[request.key], request.precedence))
            self._last_turns.update({request.key: self._num_steps for request in own[:limit]})
            sitting_out |= {request.key for request in own[limit:]}
        return sitting_out


class FairSteps:
    """Owns what is known of the clients: their limits, their turns, and which of them were active a moment ago.

    max_slowdown: how many times as long one client may make a step; 0: without limit. answers: the limit in steps of
    answers alone. prompts: the limit in steps that compute prompts.
    """

    def __init__(self, max_slowdown: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.answers = RowLimit(max_slowdown)
        self.prompts = RowLimit(max_slowdown)
        self._max_slowdown = max_slowdown
        self._clock = clock
        self._last_active: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._turns = Turns()
        self._largest: int | None = None
        self._step: FairStep | None = None
        self._pause_until = 0.0

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took. Steps in which received answers start are not measured."""
        num_rows = len(scheduled.num_scheduled_tokens)
        if not num_rows or not seconds:
            return
        # Measured in steps, because what another client's request waits for is the end of one.
        self._pause_until = self._clock() + _PAUSE * seconds
        if not scheduled.is_decode_only:
            started = self._step.num_started if self._step and self._step.limit is not None else None
            self.prompts.note(num_rows, max(started.values(), default=0) if started else None, seconds)
        elif not scheduled.scheduled_new_reqs and not scheduled.scheduled_spec_decode_tokens:
            self.answers.note(num_rows, self._largest, seconds)

    def seconds_to_pause(self, *queues: PriorityQueue) -> float:
        """Return the seconds by which to delay the next step, if it holds only one client's answers, and those are limited.

        A pause is three times as long as a step, so that another client's request mostly finds the machine idle.
        """
        if self._step is None or not self._step.sitting_out:
            return 0.0
        clients = set[str]().union(*(queue.clients for queue in queues))
        return max(0.0, self._pause_until - self._clock()) if len(clients) == 1 else 0.0

    @property
    def max_slowdown_of_others(self) -> float:
        """The factor by which one client may lengthen a step of others; infinite while there is only one client."""
        is_limited = self._step is not None and self._step.limit is not None
        return self._max_slowdown if is_limited else inf

    def may_hold_all(self, running: PriorityQueue) -> bool:
        """Return whether no running answer would sit out the next step."""
        clients = self._last_active.keys() | running.clients
        return (
            self._max_slowdown == 0
            or len(clients) < 2
            or _most(running) <= self._limit_among(clients, running)
        )

    def begin(self, running: PriorityQueue, *others: PriorityQueue) -> FairStep:
        """Return the limits of the next step. others: requests that could start in it."""
        clients = set(running.clients).union(*(queue.clients for queue in others))
        now = self._clock()
        recent = {client: at for client, at in self._last_active.items() if now - at < RECENT_SECONDS}
        self._last_active = recent | dict.fromkeys(clients, now)
        # A client that is alone has the whole machine; what it was served meanwhile is not held against it later.
        if len(self._last_active) < 2 or self._max_slowdown == 0:
            self._largest = None
            self._served = {}
            self._step = FairStep(None, set(), self._served)
            return self._step
        # A client that has just come does not make up for the time before.
        least = min((self._served[client] for client in recent if client in self._served), default=0.0)
        self._served = {client: max(least, self._served.get(client, 0.0)) for client in self._last_active}
        limit = self._limit_among(self._last_active, running)
        most = _most(running)
        self._largest = min(limit, most)
        sitting_out = self._turns.choose(running, limit) if most > limit else set()
        max_starts = max(MIN_ROWS, self.answers.rows if running.requests else self.prompts.rows)
        self._step = FairStep(max_starts, sitting_out, self._served)
        return self._step

    def _limit_among(self, clients: Collection[str], running: PriorityQueue) -> int:
        # A client may always have as many rows as the one with fewest.
        return max(self.answers.rows, min(map(running.num_of, clients)))


def _most(running: PriorityQueue) -> int:
    """Return the number of requests of the client with most."""
    return max(map(running.num_of, running.clients), default=0)
