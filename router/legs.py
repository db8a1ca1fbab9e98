"""Where the parts of a request run: a placement is a list of leg plans, and a table says what each kind of leg does.

A new kind of leg is a new row of the table and a placement that names it. Attempts and relays know no kind by name.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from contract.requests import EngineRequest
from wire.legs import decode_to_proto, embed_to_proto, prefill_to_proto

if TYPE_CHECKING:  # policies are pure, and need no gRPC
    from router.worker_calls import WorkerCalls

PREFILL = "prefill"
"""Computes the prompt, sends its KV, and emits the first token."""
DECODE = "decode"
"""Receives the prompt's KV, and emits the other tokens."""
AGGREGATED = "aggregated"
"""Computes the prompt and emits all tokens."""
EMBED = "embed"
"""Computes the prompt and returns its embedding."""


@dataclass(frozen=True)
class LegPlan:
    """One leg of a request. kind: a key of the table of kinds. worker: a worker id.

    first_index: index in the answer of the first token that the leg emits.
    """

    kind: str
    worker: str
    first_index: int = 0


@dataclass(frozen=True)
class Placement:
    """The legs of a request in the order in which one takes over from the other. The last one ends the request."""

    legs: tuple[LegPlan, ...]

    @property
    def end(self) -> str:
        """Id of the worker that ends the request."""
        return self.legs[-1].worker

    def worker_of(self, kind: str) -> str | None:
        """Return the id of the worker that has the leg of this kind; None without such a leg."""
        return next((leg.worker for leg in self.legs if leg.kind == kind), None)


class Transfer(Enum):
    """What a leg does with KV. RECEIVE: it fetches the KV that the leg before it sends."""

    NONE = auto()
    SEND = auto()
    RECEIVE = auto()


class Result(Enum):
    """What a leg contributes to the answer itself. NONE: only later legs read what it computes."""

    NONE = auto()
    TOKENS = auto()
    EMBEDDING = auto()


StartLeg = Callable[["WorkerCalls", EngineRequest, str], Coroutine[Any, Any, None]]
"""Makes the call that starts a leg in a worker's session. The call returns when the worker has accepted the leg."""


@dataclass(frozen=True, kw_only=True)
class LegKind:
    """What is particular to one kind of leg. num_tokens_before: tokens that earlier legs of the attempt emit."""

    start: StartLeg
    transfer: Transfer = Transfer.NONE
    result: Result = Result.TOKENS
    num_tokens_before: int = 0


def _start_prefill(calls: "WorkerCalls", request: EngineRequest, session: str) -> Coroutine[Any, Any, None]:
    return calls.prefill(prefill_to_proto(request, session))


def _start_decode(calls: "WorkerCalls", request: EngineRequest, session: str) -> Coroutine[Any, Any, None]:
    return calls.decode(decode_to_proto(request, session))


def _start_embed(calls: "WorkerCalls", request: EngineRequest, session: str) -> Coroutine[Any, Any, None]:
    return calls.embed(embed_to_proto(request, session))


LEG_KINDS: Mapping[str, LegKind] = MappingProxyType(
    {
        PREFILL: LegKind(start=_start_prefill, transfer=Transfer.SEND),
        DECODE: LegKind(start=_start_decode, transfer=Transfer.RECEIVE, num_tokens_before=1),
        AGGREGATED: LegKind(start=_start_decode),
        EMBED: LegKind(start=_start_embed, result=Result.EMBEDDING),
    }
)
"""The kinds of leg that this router places."""


def placed(*legs: tuple[str, str], num_delivered: int = 0) -> Placement:
    """Plan these legs, each a kind and a worker id, for an answer of which ``num_delivered`` tokens were delivered."""
    return Placement(
        tuple(
            LegPlan(kind, worker, num_delivered + LEG_KINDS[kind].num_tokens_before) for kind, worker in legs
        )
    )
