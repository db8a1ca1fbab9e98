"""``kvbaton chat`` through a pipe and through a pseudo terminal, against a small real service and a real router."""

import asyncio
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from contract.identity import Role
from tests.cli.chat_service import ChatService, running_chat_service
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, word_id

PROMPT = r"> "
WAIT_SECONDS = 60


@pytest.fixture
async def service() -> AsyncIterator[ChatService]:
    async with running_chat_service() as running:
        yield running


async def piped(service: ChatService, text: str, *flags: str) -> tuple[int, str, str]:
    """Run a chat on these lines; return the exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "chat", "--url", service.url, *flags),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(text.encode()), WAIT_SECONDS)
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


class Screen:
    """The user's end of a pseudo terminal."""

    def __init__(self, fd: int, process: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> None:
        self.process = process
        self._fd = fd
        self._reader = reader
        self._seen = ""

    async def expect(self, pattern: str) -> str:
        """Read until ``pattern`` appears, and return the text up to its end."""
        while not (match := re.search(pattern, self._seen)):
            try:
                data = await asyncio.wait_for(self._reader.read(4096), WAIT_SECONDS)
            except TimeoutError:
                data = b""
            assert data, f"there is no {pattern!r} on the screen: {self._seen!r}"
            self._seen += data.decode(errors="replace")
        told, self._seen = self._seen[: match.end()], self._seen[match.end() :]
        return told

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._fd, text.encode())

    async def code(self) -> int:
        """Wait for the end of the process and return its exit code."""
        return await asyncio.wait_for(self.process.wait(), WAIT_SECONDS)


@asynccontextmanager
async def on_a_terminal(url: str, *flags: str) -> AsyncIterator[Screen]:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import os, sys; os.login_tty(0); os.execv(sys.executable, sys.argv[1:])"),
        *(sys.executable, "-m", "cli.main", "chat", "--url", url, *flags),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=False,
        env={**os.environ, "TERM": "xterm"},  # noqa: TID251
    )
    os.close(theirs)
    reader = asyncio.StreamReader()
    stream = os.fdopen(os.dup(ours), "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), stream
    )
    try:
        yield Screen(ours, process, reader)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        transport.close()
        os.close(ours)


async def test_a_pipe_gets_the_answers_and_nothing_else(service: ChatService) -> None:
    assert await piped(service, "hello\n\nworld\n") == (0, "HELLO\nWORLD\n", "")
    assert [message["role"] for message in service.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert service.bodies[1]["messages"][1]["content"] == "HELLO"


async def test_flags_apply_to_every_question(service: ChatService) -> None:
    flags = ("--temperature", "0.5", "--max-tokens", "9", "--seed", "4", "--served-model-name", "two")
    await piped(service, "hello\n", *flags, "--system", "be brief")
    (body,) = service.bodies
    assert (body["temperature"], body["max_tokens"], body["seed"], body["model"]) == (0.5, 9, 4, "two")
    assert body["messages"][0] == {"role": "system", "content": "be brief"}


async def test_commands(service: ChatService) -> None:
    text = "hello\n/stats\n/reset\n/system be kind\n//slash\n/exit\nnever\n"
    code, output, errors = await piped(service, text)
    assert (code, errors) == (0, "")
    stats = (
        "queue 1.0 + prefill 2.0 + transfer 3.0 = 6.0 ms (transfer hidden 500.0); 5 tokens in, 2 out (stop)"
    )
    assert output.splitlines() == ["HELLO", stats, "/SLASH"]
    assert service.bodies[1]["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "/slash"},
    ]


async def test_a_message_over_several_lines(service: ChatService) -> None:
    assert (await piped(service, "one\\\ntwo\n"))[1] == "ONE\nTWO\n"
    assert len(service.bodies) == 1


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("busy", "answered 429: the queue is full; try again in 3 s"),
        ("bad", "answered 400: that is no question"),
        ("broken", "the answer was interrupted: the worker is gone"),
        ("/stat", "unknown command /stat (did you mean /stats?); /help lists the commands"),
        ("/stats", "there is no complete answer yet"),
    ],
)
async def test_an_error_is_one_line_and_the_session_continues(
    service: ChatService, asked: str, told: str
) -> None:
    code, output, errors = await piped(service, f"{asked}\nhello\n")
    assert output.splitlines()[-1] == "HELLO"
    first, last = errors.splitlines()
    assert told in first
    assert (code, last) == (1, "kvbaton: 1 of the messages above got no answer")
    assert [message["content"] for message in service.bodies[-1]["messages"]] == ["hello"]


async def test_an_unreachable_service_is_one_line(service: ChatService) -> None:
    service.url = "http://127.0.0.1:1"
    code, output, errors = await piped(service, "hello\n")
    assert (code, output, len(errors.splitlines())) == (1, "", 1)
    assert "does not answer" in errors


async def test_ctrl_c_stops_the_answer_and_not_the_session(service: ChatService) -> None:
    async with on_a_terminal(service.url) as screen:
        await screen.expect(r"one at http\S+\. /help lists the commands")
        await screen.expect(PROMPT)
        screen.type("wait\n")
        await screen.expect("first")
        screen.type("\x03")
        await screen.expect(r"\(stopped\)")
        await asyncio.wait_for(service.cancelled.wait(), WAIT_SECONDS)
        await screen.expect(PROMPT)
        screen.type("hello\n")
        await screen.expect("HELLO")
        await screen.expect(PROMPT)
        screen.type("\x04")
        assert await screen.code() == 0
    contents = [message["content"] for message in service.bodies[-1]["messages"]]
    assert contents == ["wait", "first", "hello"]


async def test_ctrl_c_at_the_prompt_discards_the_typed_text(service: ChatService) -> None:
    async with on_a_terminal(service.url) as screen:
        await screen.expect(PROMPT)
        screen.type("rubbish")
        await screen.expect("rubbish")
        screen.type("\x03")
        await screen.expect(r"Ctrl-D or /exit leaves")
        await screen.expect(PROMPT)
        screen.type("hello\n")
        await screen.expect("HELLO")
        await screen.expect(PROMPT)
        screen.type("\x1b[A\n")
        await screen.expect("HELLO")
        await screen.expect(PROMPT)
        screen.type("/exit\n")
        assert await screen.code() == 0
    assert [body["messages"][-1]["content"] for body in service.bodies] == ["hello", "hello"]


async def test_a_paste_of_several_lines_is_one_message(service: ChatService) -> None:
    async with on_a_terminal(service.url) as screen:
        await screen.expect(PROMPT)
        screen.type("\x1b[200~one\ntwo\x1b[201~")
        await screen.expect("two")
        screen.type("\n")
        await screen.expect("TWO")
    assert [body["messages"][-1]["content"] for body in service.bodies] == ["one\ntwo"]


async def test_an_answer_cannot_control_the_terminal(service: ChatService) -> None:
    async with on_a_terminal(service.url) as screen:
        await screen.expect(PROMPT)
        screen.type("escape\n")
        assert "\x1b[2J" not in await screen.expect("gone")


async def test_a_signal_ends_it_cleanly(service: ChatService) -> None:
    async with on_a_terminal(service.url) as screen:
        await screen.expect(PROMPT)
        screen.process.send_signal(signal.SIGTERM)
        assert await screen.code() == 128 + signal.SIGTERM


async def test_ctrl_c_cancels_the_request_on_the_worker_behind_a_real_router() -> None:
    script = Script(tokens=[word_id("hello"), word_id(" world"), END], stall_at=1)
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        worker = cluster.workers["both-0"]
        async with on_a_terminal(f"http://{cluster.service.addresses.http}") as screen:
            await screen.expect(PROMPT)
            screen.type("hi\n")
            await screen.expect("hello")
            screen.type("\x03")
            async with asyncio.timeout(WAIT_SECONDS):
                await worker.received.wait_for(lambda found: bool(found.cancels))
            await screen.expect(PROMPT)
    assert len(worker.received.decodes) == 1
