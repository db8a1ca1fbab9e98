"""The messages between an engine's client and its core, over a queue or a socket (msgspec, never pickle)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.info import EngineInfo
from engine.scheduling.stats import SchedulerStats


@dataclass(frozen=True)
class Addresses:
    """The addresses of the sockets between an engine and one client, both bound by the client."""

    to_engine: str
    from_engine: str

    @classmethod
    def within(cls, folder: Path) -> "Addresses":
        """Return Unix sockets in this folder."""
        return cls(f"ipc://{folder}/in", f"ipc://{folder}/out")


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Add this request."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Abort these requests; unknown keys are ignored."""

    keys: list[str]


class AbortRequest(msgspec.Struct, frozen=True, tag="abort_request"):
    """Abort a choice of a request (None: all) in all attempts up to ``attempt`` (None: in all), and what they lend."""

    request_id: str
    attempt: int | None = None
    choice: int | None = None


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a utility of the core (``EngineCore.call``); a CallResult with the same id follows."""

    call_id: int
    method: str
    args: list[Any]


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Prepare for this request (``EngineCore.prepare``); a CallResult with the same id follows."""

    call_id: int
    request: EngineRequest


class UntilFree(msgspec.Struct, frozen=True, tag="until_free"):
    """Send a CallResult with this id once no request is live and no KV is lent."""

    call_id: int


class Share(msgspec.Struct, frozen=True, tag="share"):
    """Let further clients attach; a CallResult with the same id and the address follows."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End the engine; no later message is read. From a client that is not the first one: let it leave."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answer with Progress, and make every working thread increment its count."""


ToEngine = AddRequest | Abort | AbortRequest | Call | Ping | Prepare | Share | UntilFree | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is up. The first message to each client of an engine, or else StartFailed."""

    info: EngineInfo


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The engine could not start; ``kind``, ``message`` and ``param`` are those of the KvbatonError."""

    kind: str
    message: str
    param: str | None = None


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """The outputs of one step for one client, and the state of the engine after it."""

    outputs: list[EngineOutput]
    stats: SchedulerStats


class CallResult(msgspec.Struct, frozen=True, tag="result"):
    """The result of a utility, or its error."""

    call_id: int
    result: Any = None
    error_kind: str | None = None
    error_message: str | None = None


class Health(msgspec.Struct, frozen=True, tag="health"):
    """The state of an idle engine, as a sign of life."""

    stats: SchedulerStats


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The counts of the working threads, each of which grows with what its thread finishes."""

    counts: dict[str, int]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The engine's last message; ``error`` is None when it was asked to stop."""

    error: str | None = None


FromEngine = Ready | StartFailed | StepOutputs | CallResult | Health | Progress | Stopped
