"""``kvbaton batch``: sends the requests of a file over HTTP and writes the answers to another file."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from contract.errors import KvbatonError, SettingError, UnavailableError
from launch.arguments import parse
from launch.client_settings import BatchSettings
from launch.kept_process import Facts
from launch.local_cluster import run_local
from launch.processes import ROUTER
from launch.progress import progress_bar
from serving import signals
from serving.logs import configure_logs

_BUSY = (429, 503)
_LONGEST_PAUSE_SECONDS = 60.0


def batch(arguments: Sequence[str]) -> None:
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


class BatchClient:
    """Sends requests to the service at ``url``."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_retries: int) -> None:
        self._session = session
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        self._max_retries = max_retries

    async def send(self, request: BatchRequest) -> Response:
        """Return the service's final reply, with any status. Raises UnavailableError when it no longer answers."""
        for attempt in range(self._max_retries + 1):
            is_last = attempt == self._max_retries
            pause = min(0.5 * 2.0**attempt, _LONGEST_PAUSE_SECONDS)
            try:
                async with self._session.post(
                    f"{self._url}{request.path}", data=request.body, headers=self._headers
                ) as reply:
                    response = _response(reply, await reply.read())
                if reply.status not in _BUSY or is_last:
                    return response
                pause = retry_after_seconds(reply.headers, pause)
            except (aiohttp.ClientError, TimeoutError) as error:
                # Sent again though the service may have answered: that costs a computation, and a lost answer the line.
                if is_last:
                    reason = str(error) or type(error).__name__
                    raise UnavailableError(f"{self._url} no longer answers: {reason}") from error
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


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

            async def ask_local(facts: dict[str, Facts], _: asyncio.Event) -> None:
                await self._ask_all(local_endpoint(self._settings, facts[ROUTER]))

            run_local(self._settings, ask_local)
        else:
            signals.run(self._ask_all(endpoint_at(self._settings.url, self._settings)))

    async def _ask_all(self, endpoint: Endpoint) -> None:
        settings = self._settings
        with ExitStack() as opened:
            write = opened.enter_context(appending(settings.output))
            advance = opened.enter_context(progress_bar("Requests", self.num_lines))
            lines = read_lines(settings.input)
            async with endpoint.open_session(settings.max_concurrency) as session:
                client = BatchClient(session, endpoint.url, settings.max_retries)
                tasks = [
                    asyncio.create_task(self._work(client, lines, write, advance))
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
        client: BatchClient,
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
                    found = result(line.custom_id, await client.send(line))
                else:
                    problem = Problem("invalid_line", f"line {line.number}: {line.reason}", line.number)
                    found = result(line.custom_id, error=problem)
                write(found)
                self._num_answered += found.is_answer
                self.num_failed += not found.is_answer
            advance()
