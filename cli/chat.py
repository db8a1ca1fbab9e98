"""``kvbaton chat``: a conversation in the terminal, or line by line through a pipe.

The main thread waits for the user, and runs an event loop only while an answer streams, so that Ctrl-C cancels only that
answer. A service that the command starts itself runs in another thread (``launch.local_cluster``).
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from cli.ask import TIMING_PARTS, OnText, StreamedAnswer, served_model, stream_chat
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from cli.terminal import Pipe, Terminal, replace_unencodable
from contract.errors import KvbatonError
from launch.arguments import parse
from launch.client_settings import ChatSettings
from launch.local_cluster import local_service
from serving.logs import configure_logs
from serving.settings import first_listed
from serving.settings_file import nearest

_HELP = """/system TEXT  set the system message (without TEXT: none)
/reset        forget the conversation
/stats        show the latency breakdown of the last answer
/exit         leave; so does Ctrl-D
//TEXT        send /TEXT as a message
Ctrl-C stops the answer. End a line with a backslash to continue the message on the next line."""


class Leave(Exception):  # noqa: N818
    """The user ends the chat."""


def chat(arguments: Sequence[str]) -> None:
    """Run ``kvbaton chat``."""
    settings = parse(ChatSettings, "kvbaton chat", arguments)
    settings.refuse_contradictions()
    configure_logs("chat", settings.log_level)
    replace_unencodable()
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    terminal = Terminal() if is_terminal else Pipe(sys.stdin, sys.stdout)
    try:
        with _end_on_sigterm(), _service(settings, terminal) as endpoint, asyncio.Runner() as runner:
            model = first_listed(settings.served_model_name) or runner.run(served_model(endpoint))
            terminal.remark(f"{model} at {endpoint.url}. /help lists the commands, Ctrl-D leaves.")
            conversation = Conversation(endpoint, _body(settings, model), settings.system)
            Chat(conversation, terminal, runner).run()
    except KeyboardInterrupt:
        sys.exit(130)


class Conversation:
    """Owns the messages. body: fields of every request (model, temperature, ...). last: the last complete answer."""

    def __init__(self, endpoint: Endpoint, body: Mapping[str, Any], system: str | None = None) -> None:
        self.system = system
        self.last: StreamedAnswer | None = None
        self._endpoint = endpoint
        self._body = dict(body)
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that precede the next question."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._turns]

    def reset(self) -> None:
        """Clear the conversation; the system message stays."""
        self._turns.clear()

    async def ask(self, text: str, on_text: OnText) -> StreamedAnswer:
        """Send a message with the conversation so far. ``on_text`` gets the pieces of the answer.

        The text of a cancelled answer is kept; a question that failed or got no text is dropped. Raises KvbatonError as
        ``stream_chat`` does.
        """
        pieces: list[str] = []

        def receive(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        question = {"role": "user", "content": text}
        try:
            answer = await stream_chat(
                self._endpoint, {**self._body, "messages": [*self.messages, question]}, receive
            )
        except asyncio.CancelledError:
            # The user has read these pieces and may refer to them; a question without any answer is better left out.
            if pieces:
                self._keep(question, "".join(pieces))
            raise
        self._keep(question, answer.text)
        self.last = answer
        return answer

    def stats(self) -> str:
        """Return the latency breakdown of the last answer, in one line. Raises KvbatonError if there is no answer."""
        if self.last is None:
            raise KvbatonError("there is no complete answer yet")
        answer = self.last
        counts = f"{answer.num_prompt_tokens} tokens in, {answer.num_completion_tokens} out ({answer.finish_reason})"
        if not answer.timings:
            return f"{counts}; the service sent no timings"
        parts = {name: answer.timings[name] * 1000 for name in TIMING_PARTS if name in answer.timings}
        total = answer.timings.get("end_to_end", 0.0) * 1000
        hidden = answer.timings.get("transfer_hidden", 0.0) * 1000
        shown = " + ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in parts.items())
        return f"{shown} = {total:.1f} ms (transfer hidden {hidden:.1f}); {counts}"

    def _keep(self, question: dict[str, str], answer: str) -> None:
        self._turns += [question, {"role": "assistant", "content": answer}]


class Chat:
    """One session: sends what the user types until the user leaves."""

    def __init__(self, conversation: Conversation, terminal: Terminal | Pipe, runner: asyncio.Runner) -> None:
        self._conversation = conversation
        self._terminal = terminal
        self._runner = runner
        self._num_failed = 0
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/reset": self._reset,
            "/stats": lambda _: self._terminal.show(self._conversation.stats()),
            "/help": lambda _: self._terminal.show(_HELP),
            "/exit": self._leave,
            "/quit": self._leave,
        }

    def run(self) -> None:
        """Run until the input ends. Raises KvbatonError at the end if a piped message got no answer."""
        while (text := self._terminal.read()) is not None:
            try:
                self._process(text.strip())
            except Leave:
                break
            except KvbatonError as error:
                self._num_failed += 1
                self._terminal.show_error(error.message)
            except KeyboardInterrupt:
                self._terminal.on_interrupt()
        if self._num_failed and not self._terminal.is_interactive:
            raise KvbatonError(f"{self._num_failed} of the messages above got no answer")

    def _process(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name.startswith("/") and not name.startswith("//"):
            if name not in self._commands:
                raise KvbatonError(
                    f"unknown command {name}{nearest(name, self._commands)}; /help lists the commands"
                )
            self._commands[name](rest.strip())
        elif text:
            self._runner.run(self._conversation.ask(text.removeprefix("/"), self._terminal.write))
            self._terminal.end_line()

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        self._terminal.remark("the system message is set" if text else "the system message is removed")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._terminal.remark("the conversation is cleared")

    def _leave(self, _: str) -> None:
        raise Leave


def _body(settings: ChatSettings, model: str) -> dict[str, Any]:
    options = {"max_tokens": settings.max_tokens, "seed": settings.seed}
    given = {name: value for name, value in options.items() if value is not None}
    return {"model": model, "temperature": settings.temperature, **given}


@contextmanager
def _service(settings: ChatSettings, terminal: Terminal | Pipe) -> Iterator[Endpoint]:
    if settings.url is not None:
        yield endpoint_at(settings.url, settings)
        return
    terminal.remark(f"starting {settings.model} on this machine")
    with local_service(settings) as router:
        yield local_endpoint(settings, router)


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """End the process cleanly on SIGTERM and SIGHUP within the block, wherever it waits."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
