"""``kvbaton batch``: sends the requests of a file over HTTP and writes the answers to another file."""

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from cli.batch_client import BatchClient
from cli.batch_files import (
    BadLine,
    BatchRequest,
    Problem,
    Result,
    answered,
    appending,
    count_lines,
    read_lines,
    result,
)
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from contract.errors import KvbatonError, SettingError
from launch.arguments import parse
from launch.client_settings import BatchSettings
from launch.local_cluster import run_local
from launch.progress import progress_bar
from launch.router_processes import ROUTER
from launch.spec import Facts
from serving import signals
from serving.logs import configure_logs


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
            run_local(self._settings, self._ask_local)
        else:
            signals.run(self._ask_all(endpoint_at(self._settings.url, self._settings)))

    async def _ask_local(self, facts: dict[str, Facts], _: asyncio.Event) -> None:
        await self._ask_all(local_endpoint(self._settings, facts[ROUTER]))

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
        for line in lines:
            if isinstance(line, BatchRequest) and line.custom_id in self._answered:
                self._num_earlier += 1
            else:
                found = await _result(client, line)
                write(found)
                self._num_answered += found.is_answer
                self.num_failed += not found.is_answer
            advance()


async def _result(client: BatchClient, line: BatchRequest | BadLine) -> Result:
    if isinstance(line, BatchRequest):
        return result(line.custom_id, await client.send(line))
    problem = Problem("invalid_line", f"line {line.number}: {line.reason}", line.number)
    return result(line.custom_id, error=problem)
