"""A worker in simulated time: prompts one after another, and a batch of answers that advance together.

The batch is not computed step by step: between two events all of its answers advance at the pace of a step at the first of
them. Prompts and answers of a worker that has changed its role do not delay each other.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from autoscaler.timing_model import TimingModel
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.timeline import Timeline

NoteSteps = Callable[[float, float], None]
"""Called with the seconds of a step, and the number of tokens that were emitted at this pace."""


@dataclass(eq=False)
class SimulatedRequest:
    """A request in the simulation. Times are None until it is so far; ``num_left`` tokens are still to be decoded."""

    arrival: Arrival
    number: int
    first_token: float | None = None
    finished: float | None = None
    num_left: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""

    @property
    def itl(self) -> float | None:
        """The mean time between two tokens; None for an answer of one token."""
        gaps = self.arrival.answer_tokens - 1
        if self.finished is None or self.first_token is None or not gaps:
            return None
        return (self.finished - self.first_token) / gaps


class SimulatedPrefill:
    """Computes prompts in the order in which they come. on_done: called with each request at its first token.

    note_prompt: called with the seconds that a prompt has taken, and its tokens.
    """

    def __init__(
        self,
        timeline: Timeline,
        timing: TimingModel,
        on_done: Callable[[SimulatedRequest], None],
        note_prompt: Callable[[float, int], None],
    ) -> None:
        self._timeline = timeline
        self._timing = timing
        self._on_done = on_done
        self._note_prompt = note_prompt
        self._queue: deque[SimulatedRequest] = deque()

    def add(self, request: SimulatedRequest) -> None:
        """Queue a prompt."""
        self._queue.append(request)
        if len(self._queue) == 1:
            self._start()

    def _start(self) -> None:
        self._timeline.after(self._seconds_of(self._queue[0]), self._end)

    def _end(self) -> None:
        done = self._queue.popleft()
        self._note_prompt(self._seconds_of(done), done.arrival.prompt_tokens)
        if self._queue:
            self._start()
        self._on_done(done)

    def _seconds_of(self, request: SimulatedRequest) -> float:
        return self._timing.prefill.seconds(request.arrival.prompt_tokens)


@dataclass
class _Batch:
    """The answers of a worker, by the number of steps since its start after which each ends."""

    ends: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    num_steps: float = 0.0
    context: float = 0.0
    """Tokens of all answers and their prompts."""


class SimulatedDecode:
    """Continues answers, all at the same pace. on_done: called with each request at its last token."""

    def __init__(
        self,
        timeline: Timeline,
        timing: TimingModel,
        on_done: Callable[[SimulatedRequest], None],
        note_steps: NoteSteps,
    ) -> None:
        self._timeline = timeline
        self._timing = timing
        self._on_done = on_done
        self._note_steps = note_steps
        self._batch = _Batch()
        self._advanced_at = timeline.now
        self._version = 0
        self._numbers = count()

    @property
    def num_answers(self) -> int:
        """The answers in the batch."""
        return len(self._batch.ends)

    def add(self, request: SimulatedRequest) -> None:
        """Let an answer join the batch, for its ``num_left`` tokens."""
        self.advance()
        batch = self._batch
        heapq.heappush(batch.ends, (batch.num_steps + request.num_left, next(self._numbers), request))
        batch.context += self._context_of(request, request.num_left)
        self._plan()

    def remove_all(self) -> list[SimulatedRequest]:
        """Take all answers away, with the tokens that are left of each."""
        self.advance()
        batch = self._batch
        removed = []
        for end, _, request in batch.ends:
            request.num_left = end - batch.num_steps
            removed.append(request)
        self._batch = _Batch()
        self._plan()
        return removed

    def advance(self) -> None:
        """Let the answers advance up to now. No answer ends: each end is an event of its own."""
        seconds = self._timeline.now - self._advanced_at
        self._advanced_at = self._timeline.now
        batch = self._batch
        if not batch.ends or seconds <= 0:
            return
        step = self._step_seconds()
        num_steps = min(seconds / step, batch.ends[0][0] - batch.num_steps)
        batch.num_steps += num_steps
        batch.context += num_steps * len(batch.ends)
        self._note_steps(step, num_steps * len(batch.ends))

    def _plan(self) -> None:
        """Plan the next end. An end that was planned before is void."""
        self._version += 1
        version = self._version
        if self._batch.ends:
            num_steps = self._batch.ends[0][0] - self._batch.num_steps
            self._timeline.after(num_steps * self._step_seconds(), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self.advance()
        end, _, request = heapq.heappop(self._batch.ends)
        self._batch.num_steps = end
        self._batch.context -= self._context_of(request, 0.0)
        self._plan()
        self._on_done(request)

    def _step_seconds(self) -> float:
        return self._timing.step_seconds(len(self._batch.ends), max(0.0, self._batch.context))

    def _context_of(self, request: SimulatedRequest, num_left: float) -> float:
        return request.arrival.prompt_tokens + request.arrival.answer_tokens - num_left
