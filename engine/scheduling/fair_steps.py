"""How many answers of one client a step may hold while other clients' answers are computed too.

Every request of a batch waits for the whole step. Where each row makes a step longer (on a processor, or with long
contexts), a client with a hundred answers makes each token of everybody else's many times slower. So a step holds no more
rows of one client than make it so many times as long as a step of a few rows (``max_key_slowdown``); where rows are as good
as free, as on a GPU that is not full, that is all of them. Rows that are left out take turns. Prompts likewise: the client
that was served least begins next, and no client begins more of them in a step than make it that much longer.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection

from engine.outputs import SchedulerOutput
from engine.scheduling.priority_queue import PriorityQueue
from engine.scheduling.request import Request

RECENT_SECONDS = 1.0
"""For how long after its last step a client counts as one that others must leave room for."""
MIN_ROWS = 2
"""Rows that every client gets, whatever they cost."""
_GROWTH = 1.1
_CUT = 0.9
_UP = 0.02
_DOWN = 0.3
"""How fast the length of a short step follows longer and shorter ones: a busy moment shall not become the measure."""
_PAUSE = 3
"""How many times as long as a step of one limited client's answers the pause before the next one is."""


class RowLimit:
    """Finds how many rows a client may have: more while steps stay short, fewer when they get too long (as TCP does).

    What a row costs is not constant (contexts grow, processors get busy), so that it is tried and not computed. Used from
    one thread.

    max_slowdown: how many times as long as one of a few rows a step may take.
    """

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._rows = 2.0 * MIN_ROWS
        self._short_seconds = self._seconds = 0.0

    @property
    def rows(self) -> int:
        """Return the limit."""
        return round(self._rows)

    def note(self, num_rows: int, largest: int | None, seconds: float) -> None:
        """Take in a measured step. largest: rows of the client with most; None where it had the step for itself."""
        if num_rows <= MIN_ROWS + 1:
            weight = _DOWN if seconds < self._short_seconds else _UP
            self._short_seconds = _smoothed(self._short_seconds, seconds, weight)
        if largest is None or not self._short_seconds:
            return
        self._seconds = _smoothed(self._seconds, seconds, 0.5)
        if self._seconds > self._max_slowdown * self._short_seconds:
            self._rows = max(MIN_ROWS, _CUT * min(self._rows, largest))
        elif largest >= self.rows:
            self._rows *= _GROWTH


class FairStep:
    """One step in the making: whose answers sit it out, and whose requests start next.

    limit: rows of one client; None where there is one client only. served: prompt tokens that were begun, by client.
    """

    def __init__(self, limit: int | None, sitting_out: set[str], served: dict[str, float]) -> None:
        self.limit = limit
        self.sitting_out = sitting_out
        self.num_started: Counter[str] = Counter()
        self._served = served

    def next_of(self, line: PriorityQueue) -> Request | None:
        """Return who starts next: of the client that was served least, unless it has started enough in this step."""
        limit = self.limit
        if limit is None:
            return line.first
        firsts = [line.first_of(client) for client in line.clients if self.num_started[client] < limit]
        return min(firsts, key=lambda one: (self._served[one.asked.tenant], one.precedence), default=None)

    def started(self, request: Request, num_tokens: int) -> None:
        """Take in that a request starts with so many tokens in this step."""
        self.num_started[request.asked.tenant] += 1
        if self.limit is not None:
            self._served[request.asked.tenant] += num_tokens


class FairSteps:
    """Owns what is known of the clients: how many rows are too many, whose turn it is, and who was there a moment ago.

    max_slowdown: how many times as long one client may make a step; 0: as it likes. answers: the limit in steps of answers
    alone. prompts: the limit in steps that compute prompts.
    """

    def __init__(self, max_slowdown: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_on = max_slowdown > 0
        self.answers, self.prompts = RowLimit(max_slowdown), RowLimit(max_slowdown)
        self._clock = clock
        self._last_here: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._turns: dict[str, int] = {}
        self._num_steps = 0
        self._largest: int | None = None
        self._step: FairStep | None = None
        self._pause_until = 0.0

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Take in how long a step took. One in which answers begin that are computed elsewhere says nothing."""
        num_rows = len(scheduled.num_scheduled_tokens)
        if not num_rows or not seconds:
            return
        self._pause_until = self._clock() + _PAUSE * seconds
        if num_rows < scheduled.total_num_scheduled_tokens:
            started = self._step.num_started if self._step and self._step.limit is not None else None
            self.prompts.note(num_rows, max(started.values(), default=0) if started else None, seconds)
        elif not scheduled.scheduled_new_reqs:
            self.answers.note(num_rows, self._largest, seconds)

    def seconds_to_pause(self, *lines: PriorityQueue) -> float:
        """Return how long the coming step is delayed, where one client's answers are limited: three times a step.

        Not while another client's request is in one of the lines. So that one mostly finds the machine idle.
        """
        if self._step is None or not self._step.sitting_out:
            return 0.0
        clients = set[str]().union(*(line.clients for line in lines))
        return max(0.0, self._pause_until - self._clock()) if len(clients) == 1 else 0.0

    def may_hold_all(self, running: PriorityQueue) -> bool:
        """Return whether no answer of these would sit out the coming step."""
        clients = self._last_here.keys() | running.clients
        return (
            not self._is_on or len(clients) < 2 or self._most(running) <= self._limit_among(clients, running)
        )

    def begin(self, running: PriorityQueue, *others: PriorityQueue) -> FairStep:
        """Return what the coming step may hold. others: requests that could start in it."""
        clients = set(running.clients).union(*(line.clients for line in others))
        now = self._clock()
        here = {client: at for client, at in self._last_here.items() if now - at < RECENT_SECONDS}
        self._last_here = here | dict.fromkeys(clients, now)
        if len(self._last_here) < 2 or not self._is_on:
            self._largest = None
            self._served = {}
            self._step = FairStep(None, set(), self._served)
            return self._step
        least = min((self._served[client] for client in here if client in self._served), default=0.0)
        self._served = {client: max(least, self._served.get(client, 0.0)) for client in self._last_here}
        limit = self._limit_among(self._last_here, running)
        most = self._most(running)
        self._largest = min(limit, most)
        sitting_out = self._take_turns(running, limit) if most > limit else set()
        starts = max(MIN_ROWS, self.answers.rows if running else self.prompts.rows)
        self._step = FairStep(starts, sitting_out, self._served)
        return self._step

    @staticmethod
    def _most(running: PriorityQueue) -> int:
        return max(map(running.num_of, running.clients), default=0)

    def _limit_among(self, clients: Collection[str], running: PriorityQueue) -> int:
        return max(self.answers.rows, min(map(running.num_of, clients)))

    def _take_turns(self, running: PriorityQueue, limit: int) -> set[str]:
        """Return the keys of the answers that sit out this step: of each client those that had a turn last."""
        latest = self._num_steps
        self._num_steps += 1
        self._turns = {request.key: self._turns.get(request.key, latest) for request in running}
        out: set[str] = set()
        for client in running.clients:
            own = [request for request in running.of(client) if request.is_decoding]
            own.sort(key=lambda request: (self._turns[request.key], request.precedence))
            self._turns.update({request.key: self._num_steps for request in own[:limit]})
            out |= {request.key for request in own[limit:]}
        return out


def _smoothed(known: float, new: float, weight: float) -> float:
    return known + weight * (new - known) if known else new
