"""``kvbaton batch``: answers the requests of a file, and writes the answers to another file.

With ``--url`` they are sent over HTTP. Otherwise a router in this process answers them, without any port for clients.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import aiohttp
import msgspec

from cli.batch_files import (
    BadLine,
    BatchRequest,
    Problem,
    Response,
    Result,
    answered,
    appending,
    count_lines,
    read_lines,
    result,
)
from cli.endpoint import endpoint_at
from contract.errors import KvbatonError, SettingError, UnavailableError
from kvbaton.service import UseRouter, serve_offline
from launch.arguments import parse
from launch.client_settings import BatchSettings
from launch.local_cluster import run_until_signal
from launch.memory_plan import check_memory
from launch.model import check_model, find_model
from launch.progress import progress_bar
from router.http.batch_answers import BatchAnswers
from router.service import RouterService
from serving import signals
from serving.logs import configure_logs

_BUSY = (429, 503)
_LONGEST_PAUSE_SECONDS = 60.0


def run_batch(arguments: Sequence[str]) -> None:
    """Run ``kvbaton batch``."""
    settings = parse(BatchSettings, "kvbaton batch", arguments)
    settings.refuse_contradictions()
    configure_logs("batch", settings.log_level)
    work = Batch(settings)
    try:
        work.run()
    except KeyboardInterrupt:
        print(f"kvbaton: {work.account()}", file=sys.stderr)
        raise
    print(f"kvbaton: {work.account()}", file=sys.stderr)
    if work.num_failed:
        raise KvbatonError(
            f"{work.num_failed} of {work.num_lines} lines have no answer; see {settings.output} for the reasons"
        )


Post = Callable[[BatchRequest], Awaitable[tuple[Response, Mapping[str, str]]]]
"""Sends a request once and returns the reply, with any status, and its headers. Raises UnavailableError if none comes."""


async def send(request: BatchRequest, post: Post, max_retries: int) -> Response:
    """Return the service's final reply, with any status. Raises UnavailableError when it no longer answers."""
    for attempt in range(max_retries + 1):
        is_last = attempt == max_retries
        pause = min(0.5 * 2.0**attempt, _LONGEST_PAUSE_SECONDS)
        try:
            response, headers = await post(request)
            if response.status_code not in _BUSY or is_last:
                return response
            pause = retry_after_seconds(headers, pause)
        except UnavailableError:
            # Sent again though the service may have answered: that costs a computation, and a lost answer the line.
            if is_last:
                raise
        await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def post_over_http(session: aiohttp.ClientSession, url: str) -> Post:
    """Return a function that sends requests to the service at ``url``."""

    async def post(request: BatchRequest) -> tuple[Response, Mapping[str, str]]:
        headers = {"Content-Type": "application/json"}
        try:
            async with session.post(f"{url}{request.path}", data=request.body, headers=headers) as reply:
                return _response(reply, await reply.read()), reply.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise UnavailableError(f"{url} no longer answers: {reason}") from error

    return post


def post_without_http(answers: BatchAnswers) -> Post:
    """Return a function that gives requests to a router in this process, with the answers that HTTP would give."""

    async def post(request: BatchRequest) -> tuple[Response, Mapping[str, str]]:
        found = await answers(request.path, request.body, "", lambda: None)
        return Response(found.status_code, found.request_id, msgspec.Raw(found.body)), {}

    return post


def _response(reply: aiohttp.ClientResponse, raw: bytes) -> Response:
    """Return the reply with its body as one line of JSON; a body that is not JSON becomes a string."""
    try:
        body = msgspec.json.format(raw, indent=-1)
    except msgspec.DecodeError:
        body = msgspec.json.encode(raw.decode("utf-8", "replace"))
    name = reply.headers.get("x-kvbaton-request-id") or reply.headers.get("x-request-id") or ""
    return Response(reply.status, name, msgspec.Raw(body))


def retry_after_seconds(headers: Mapping[str, str], default: float) -> float:
    """Return the pause that a reply requests (RFC 9110 §10.2.3: seconds or a date), at most one minute."""
    requested = headers.get("Retry-After", "").strip()
    if requested.isdecimal():
        return min(float(requested), _LONGEST_PAUSE_SECONDS)
    try:
        until = parsedate_to_datetime(requested)
    except ValueError:
        return default
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max(0.0, (until - datetime.now(UTC)).total_seconds()), _LONGEST_PAUSE_SECONDS)


class Batch:
    """One run over the input file. Owns the counts.

    num_lines: lines of the input. num_failed: lines without an answer. is_over: True if all lines were sent.
    """

    def __init__(self, settings: BatchSettings) -> None:
        """Open the files, and repair the output of an earlier run. Raises SettingError for files that cannot be used."""
        self._settings = settings
        if settings.output.exists() and settings.output.samefile(settings.input):
            raise SettingError(f"output is {settings.output}, which is also the input", param="output")
        self.num_lines = count_lines(settings.input)
        self._answered = answered(settings.output)
        self._num_earlier = self._num_answered = self.num_failed = 0
        self.is_over = False

    def account(self) -> str:
        """Return the counts as text."""
        counts = f"{self.num_lines} lines: {self._num_answered} answered now, {self._num_earlier} earlier"
        if self.is_over:
            return f"{counts}, {self.num_failed} failed"
        return f"stopped. {counts}; run the same command again to continue"

    def run(self) -> None:
        """Send requests until all are answered. Raises UnavailableError when the service goes away."""
        if self._settings.url is None:
            self._run_offline()
        else:
            signals.run(self._ask_service(self._settings.url))

    async def _ask_service(self, url: str) -> None:
        endpoint = endpoint_at(url, self._settings)
        async with endpoint.open_session(self._settings.max_concurrency) as session:
            await self._ask_all(post_over_http(session, url))

    def _run_offline(self) -> None:
        model = find_model(self._settings.model)  # before there is an event loop: a signal ends a download

        async def serve(stopped: asyncio.Event, use: UseRouter) -> None:
            await asyncio.to_thread(check_model, self._settings, model)
            await asyncio.to_thread(check_memory, self._settings, model)
            await serve_offline(stopped, self._settings, model, use)

        async def ask(router: RouterService, _: asyncio.Event) -> None:
            await self._ask_all(post_without_http(router.line_answers))

        asyncio.run(run_until_signal(serve, ask))

    async def _ask_all(self, post: Post) -> None:
        settings = self._settings
        with ExitStack() as opened:
            write = opened.enter_context(appending(settings.output))
            advance = opened.enter_context(progress_bar("Requests", self.num_lines))
            lines = read_lines(settings.input)
            tasks = [
                asyncio.create_task(self._work(post, lines, write, advance))
                for _ in range(min(settings.max_concurrency, self.num_lines))
            ]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self.is_over = True

    async def _work(
        self,
        post: Post,
        lines: Iterator[BatchRequest | BadLine],
        write: Callable[[Result], None],
        advance: Callable[[], None],
    ) -> None:
        # All tasks take their lines from one iterator, so that no more than max_concurrency lines are in memory.
        for line in lines:
            if isinstance(line, BatchRequest) and line.custom_id in self._answered:
                self._num_earlier += 1
            else:
                if isinstance(line, BatchRequest):
                    found = result(line.custom_id, await send(line, post, self._settings.max_retries))
                else:
                    problem = Problem("invalid_line", f"line {line.number}: {line.reason}", line.number)
                    found = result(line.custom_id, error=problem)
                write(found)
                self._num_answered += found.is_answer
                self.num_failed += not found.is_answer
            advance()
