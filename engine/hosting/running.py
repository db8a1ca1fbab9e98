"""Builds an engine from a plan and runs it: the one boundary where any exception of a step is caught."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from contract.errors import ErrorKind, KvbatonError
from engine.connector import ConnectorFactory
from engine.core import EngineCore
from engine.hosting.messages import Ready, StartFailed, Stopped
from engine.settings import EngineSettings
from engine.startup import ExecutorStart, start_executor
from engine.stepping.dispatch import WAKE, Emit, Inbox
from engine.stepping.gate import StepGate
from engine.stepping.loop import StepLoop, send_outputs

logger = logging.getLogger(__name__)


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The parts of an engine that is to be built in another thread, or process (then all of them are picklable).

    start: starts the executor. idle_seconds: how long an idle engine waits for input before it reports its health.
    prepare: called first in an engine's own process, for example to set up its log. gate: makes the gate of the engine's
    steps; None: the one of the settings.
    """

    settings: EngineSettings
    connector_factory: ConnectorFactory | None = None
    start: ExecutorStart = start_executor
    idle_seconds: float = 10.0
    prepare: Callable[[], None] = _nothing
    gate: Callable[[], StepGate] | None = None


def run_engine(
    plan: EnginePlan, inbox: Inbox, emit: Emit, started: Callable[[StepLoop], None] = _nothing
) -> bool:
    """Build a core and run it until Shutdown; return whether it ended as asked.

    The first message is Ready or StartFailed, the last one Stopped. All exceptions are caught here; one in a step ends
    every request with an error, of the exception's own kind if it has one, else "internal".

    started: receives the loop before the first message. Other threads may call its ``progress`` and ``expect``.
    """
    core: EngineCore | None = None
    try:
        core = EngineCore(
            plan.settings,
            plan.connector_factory,
            wake=lambda: inbox.put(WAKE),
            start=plan.start,
            gate=plan.gate() if plan.gate is not None else None,
        )
        loop = StepLoop(core, inbox, emit, plan.idle_seconds)
        started(loop)
        emit(Ready(core.info))
        loop.run()
        send_outputs(core, core.shutdown(), emit)
        emit(Stopped())
    except Exception as error:  # noqa: BLE001 the step loop's one boundary
        _give_up(core, error, emit)
        return False
    return True


def _give_up(core: EngineCore | None, error: Exception, emit: Emit) -> None:
    if core is not None:
        logger.error("the engine failed", exc_info=error)
        kind = error.kind if isinstance(error, KvbatonError) else ErrorKind.INTERNAL
        send_outputs(core, core.scheduler.fail_all(kind, f"the engine failed: {error!r}"), emit)
        emit(Stopped(repr(error)))
        core.close()
    elif isinstance(error, KvbatonError):
        emit(StartFailed(error.kind.value, error.message, error.param))
    else:
        logger.error("the engine could not start", exc_info=error)
        emit(StartFailed(ErrorKind.INTERNAL.value, f"the engine could not start: {error!r}"))
