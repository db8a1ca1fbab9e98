"""What the client of an engine and its core say to each other, over a queue or a socket (msgspec, never pickle)."""

from typing import Any

import msgspec

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.core import EngineInfo
from engine.scheduling.stats import SchedulerStats


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Answer this request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End these requests; unknown keys are ignored."""

    keys: list[str]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort_request"):
    """End a choice of a request (None: all), of all attempts up to ``attempt`` (None: of all), and what they still lend."""

    request_id: str
    attempt: int | None = None
    choice: int | None = None


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a utility of the core (``EngineCore.call``); a CallResult with the same id follows."""

    call_id: int
    method: str
    args: list[Any]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End everything; nothing after this is read."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with Progress, and have every thread that works count once more."""


ToEngine = AddRequest | Abort | AbortRequest | Call | Ping | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is up. The first message of an engine, or else StartFailed."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not start; ``kind``, ``message`` and ``param`` are those of the KvbatonError."""

    kind: str
    message: str
    param: str | None = None


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """Everything that one client hears of one step, and how the engine stands after it."""

    outputs: list[EngineOutput]
    stats: SchedulerStats


class CallResult(msgspec.Struct, frozen=True, tag="result"):
    """What a utility returned, or its error."""

    call_id: int
    result: Any = None
    error_kind: str | None = None
    error_message: str | None = None


class Health(msgspec.Struct, frozen=True, tag="health"):
    """An idle engine says that it lives, and how it stands."""

    stats: SchedulerStats


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far each thread's count stands that moves with what the thread gets done."""

    counts: dict[str, int]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine's last message; ``error`` is None when it was asked to stop."""

    error: str | None = None


FromEngine = Ready | StartFailed | StepOutputs | CallResult | Health | Progress | Stopped
