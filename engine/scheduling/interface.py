"""The interface of a scheduler: all that the engine asks of one, and no policy, so that another one can take its place.

``EngineCore`` makes one step after the other, and adds and ends requests between them::

    scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        outputs = scheduler.update_from_output(scheduled, executor.execute_model(scheduled))

Names and meanings follow vLLM's ``SchedulerInterface``. What this engine asks beside that is below "Steps that start early"
and "Questions of the step loop". A method that is not abstract has a default that is right for every scheduler.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff
from engine.connector import SchedulerConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.stats import SchedulerStats


class SchedulerInterface(ABC):
    """Decides about every unfinished request. Called from one thread."""

    # One step.

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decide one forward pass. Its result goes to ``update_from_output`` before anything else is called."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> dict[int, list[EngineOutput]]:
        """Apply a step's results; return the outputs for each client, by client index."""

    def note_duration(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took, after its results were applied."""
        return

    # Requests enter and finish.

    @abstractmethod
    def add_request(self, engine_request: EngineRequest) -> None:
        """Queue a request; nothing runs before the next step. One that can never run is answered at once.

        Raises InvalidRequestError for a key or a transfer that is still in use, and for a transfer in an engine without a
        connector; and other KvbatonErrors for what it needs and cannot have. Then nothing has changed.
        """

    @abstractmethod
    def reject(self, engine_request: EngineRequest, error: KvbatonError) -> None:
        """Answer a request that was not accepted with its error, among the next step's outputs."""

    def prepare(self, engine_request: EngineRequest, then: Callable[[], None]) -> None:
        """Get ready for a request that may be added later; ``then`` is called, in any thread, when that is over.

        Raises the error with which ``add_request`` would reject it; then nothing follows.
        """
        then()

    @abstractmethod
    def finish_requests(self, keys: str | Iterable[str], status: RequestStatus) -> None:
        """Finish one request or many, whatever their status. Unknown keys are ignored."""

    @abstractmethod
    def abort_request(self, request_id: str, attempt: int | None, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) in all attempts up to ``attempt`` (None: in all), and what they lend.

        A prompt that is computed for several choices continues for those that are left.
        """

    def hand_off(self, order: HandOff) -> None:
        """Finish a request that decodes, and lend its KV to the attempt that continues it. Called between steps.

        Raises NotFoundError for a request that is not here, InvalidRequestError for one that has no KV to lend, or no token
        left to continue with. Then nothing has changed.
        """
        raise InvalidRequestError(f"request {order.key} is not handed off: this scheduler lends no KV")

    @abstractmethod
    def fail_all(self, kind: ErrorKind, message: str) -> dict[int, list[EngineOutput]]:
        """Answer every request with an error, without touching blocks or connector: the engine is broken."""

    @abstractmethod
    def shutdown(self) -> dict[int, list[EngineOutput]]:
        """Abort every request; return the last outputs."""

    # Counts.

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run, and how many wait (for a place, a grammar, or KV from another worker)."""

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not finished."""
        return sum(self.get_request_counts())

    def has_unfinished_requests(self) -> bool:
        """Return whether a request has not finished."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Return whether the runner still keeps a request that has finished: the next step names it."""

    def has_requests(self) -> bool:
        """Return whether a request has not finished, or the runner still keeps one that has."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @abstractmethod
    def make_stats(self) -> SchedulerStats:
        """Return a snapshot of the scheduler's state."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return counters since the start, with the names of ``serving.metric_names.WORKER_METRICS``."""

    @abstractmethod
    def debug_state(self) -> dict[str, Any]:
        """Return a view of the scheduler's state for people, as plain data."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError if the scheduler's own records contradict each other."""

    # The cache and the connector.

    @abstractmethod
    def reset_prefix_cache(self, model_fingerprint: str | None = None) -> bool:
        """Drop all cached content: the weights changed. Returns False, and does nothing, while a block is in use.

        model_fingerprint: of the weights that new requests are computed with; None: the same as before.
        """

    def get_kv_connector(self) -> SchedulerConnector | None:
        """Return the scheduler's half of the connector; None in an engine without one."""
        return None

    def on_transfers_finished(self, sent: Collection[str], received: Collection[str]) -> None:
        """Record transfers that the ranks have finished: ``sent`` has no reader any more, ``received`` has arrived."""
        return

    def process_events(self) -> None:
        """Process what connector and wait stages report."""
        return

    # Steps that start early: without these, each step starts when the results of the one before are processed.

    def prepare_next(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, which is being computed."""
        return

    def schedule_ahead(self, scheduled: SchedulerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass while ``scheduled`` is computed; None if that, or another event, could change it."""
        return None

    def schedule_early(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """Decide the next forward pass before ``output``, the result of this one, goes to ``update_from_output``.

        None if the results, or anything that has happened meanwhile, could change the decision.
        """
        return None

    # Questions of the step loop and its gate, which change nothing.

    @abstractmethod
    def needs_step(self) -> bool:
        """Return False while all requests wait for events, blocks or deadlines, so that a step would change nothing."""

    @abstractmethod
    def is_decode_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""

    @abstractmethod
    def has_room(self) -> bool:
        """Return whether another request could run. From any thread."""

    @abstractmethod
    def is_free(self) -> bool:
        """Return whether no request is live, no output waits, and no KV is lent to other engines."""

    @abstractmethod
    def flush_urgent(self) -> dict[int, list[EngineOutput]]:
        """Return the outputs until now, by client index, if one of them is to be sent before the next step."""

    def next_deadline(self) -> float | None:
        """Return when, on the clock, a deadline is due, and with it a step; None if there is none."""
        return None

    def seconds_to_pause(self) -> float:
        """Return how long the next step is delayed, so that other clients find the machine idle."""
        return 0.0
