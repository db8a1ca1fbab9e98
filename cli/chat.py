"""``kvbaton chat``: a conversation in the terminal, or line by line through a pipe.

The main thread waits for the user, and runs an event loop only while an answer streams: so Ctrl-C cancels that answer
and nothing else. A service of its own runs in another thread (``launch.background``).
"""

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from cli.ask import served_model
from cli.conversation import Conversation
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from cli.terminal import Pipe, Terminal, open_terminal
from contract.errors import KvbatonError
from launch.arguments import parse
from launch.background import local_service
from launch.client_settings import ChatSettings
from serving.logs import configure_logs
from serving.settings_file import nearest

_HELP = """/system TEXT  set the system message (without TEXT: none)
/reset        forget the conversation
/stats        where the time of the last answer went
/exit         leave, as Ctrl-D does
//TEXT        send TEXT with one slash
Ctrl-C stops the answer; a line that ends with a backslash goes on in the next one."""


class Leave(Exception):  # noqa: N818
    """The user wants to leave."""


def chat(arguments: Sequence[str]) -> None:
    """``kvbaton chat``."""
    settings = parse(ChatSettings, "kvbaton chat", arguments)
    settings.refuse_contradictions()
    configure_logs("chat", settings.log_level)
    terminal = open_terminal()
    try:
        with _ended_by_sigterm(), _service(settings, terminal) as endpoint, asyncio.Runner() as runner:
            model = settings.served_model_name or runner.run(served_model(endpoint))
            terminal.say(f"{model} at {endpoint.url}. /help lists the commands, Ctrl-D leaves.")
            conversation = Conversation(endpoint, _body(settings, model), settings.system)
            Chat(conversation, terminal, runner).run()
    except KeyboardInterrupt:
        sys.exit(130)


class Chat:
    """One session: asks what the user types until the user leaves."""

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
        """Raises KvbatonError at the end where a piped message got no answer, KeyboardInterrupt from a pipe only."""
        while (text := self._terminal.read()) is not None:
            try:
                self._take(text.strip())
            except Leave:
                break
            except KvbatonError as error:
                self._num_failed += 1
                self._terminal.complain(error.message)
            except KeyboardInterrupt:
                self._terminal.stopped()
        if self._num_failed and not self._terminal.is_interactive:
            raise KvbatonError(f"{self._num_failed} of the lines above got no answer")

    def _take(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        if name.startswith("/") and not name.startswith("//"):
            if name not in self._commands:
                raise KvbatonError(f"{name} is no command{nearest(name, self._commands)}; /help lists them")
            self._commands[name](rest.strip())
        elif text:
            self._runner.run(self._conversation.ask(text.removeprefix("/"), self._terminal.write))
            self._terminal.end_line()

    def _set_system(self, text: str) -> None:
        self._conversation.system = text or None
        self._terminal.say("the system message is set" if text else "there is no system message now")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._terminal.say("the conversation is forgotten")

    def _leave(self, _: str) -> None:
        raise Leave


def _body(settings: ChatSettings, model: str) -> dict[str, Any]:
    asked = {"max_tokens": settings.max_tokens, "seed": settings.seed}
    given = {name: value for name, value in asked.items() if value is not None}
    return {"model": model, "temperature": settings.temperature, **given}


@contextmanager
def _service(settings: ChatSettings, terminal: Terminal | Pipe) -> Iterator[Endpoint]:
    if settings.url is not None:
        yield endpoint_at(settings.url, settings)
        return
    terminal.say(f"starting {settings.model} on this machine")
    with local_service(settings) as router:
        yield local_endpoint(settings, router)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM and a closed terminal end the process in order, wherever it waits."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(0)

    earlier = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
