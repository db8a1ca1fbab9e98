"""All that the router holds for the answers of one client's request."""

from collections.abc import Sequence

from router.inbox import UnreadAccount
from router.prepared_request import PreparedRequest
from router.request import EmbeddingRequest, GenerationRequest
from router.request_run import PromptRuns, RequestRun, RequestRuns
from router.request_tracker import RequestTracker
from router.tasks import cooperatively
from router.tracked_request import TrackedRequest


class OpenAnswers:
    """Owns the answers of one client's request until its block ends: their places in the tracker, and their runs.

    runs: one for each answer, in order, after ``open_runs``.
    """

    def __init__(self, tracker: RequestTracker, runs: RequestRuns) -> None:
        self.runs: list[RequestRun] = []
        self._tracker = tracker
        self._parts = runs
        self._tracked: list[list[TrackedRequest]] = []
        self._prompts: list[PromptRuns] = []
        self._unread: UnreadAccount | None = None

    def __enter__(self) -> "OpenAnswers":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            for prompt in reversed(self._prompts):
                prompt.close()
            if self._unread:
                self._unread.close()
        finally:
            for answers in reversed(self._tracked):
                for tracked in reversed(answers):
                    tracked.leave(error)

    async def admit(self, requests: Sequence[GenerationRequest | EmbeddingRequest]) -> None:
        """Admit every answer to the prompts. Raises OverloadedError, UnavailableError."""
        async for request in cooperatively(requests):
            answers: list[TrackedRequest] = []
            self._tracked.append(answers)
            for _ in request.choices:
                answers.append(self._tracker.open(request))  # noqa: PERF401 - those that were admitted leave if one is not

    async def open_runs(self, prepared: Sequence[PreparedRequest], tenant: str) -> None:
        """Open a run for every answer to the prompts, which were admitted before."""
        self._unread = self._parts.unread.open(tenant)
        async for prompt, answers in cooperatively(zip(prepared, self._tracked, strict=True)):
            opened = self._parts.open(prompt, answers, self._unread)
            self._prompts.append(opened)
            self.runs += opened.runs
