"""Legs as data: the kinds of leg, the legs that a request needs, and the workers that were chosen for them.

A new kind of leg is a new row of ``LEG_KINDS`` and a plan that names it. Attempts and request runs name no kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import msgspec

from contract.identity import Role
from contract.requests import EngineRequest
from protos import worker_pb2 as pb
from wire.legs import decode_to_proto, embed_to_proto, prefill_to_proto

PREFILL = "prefill"
"""Computes the prompt, sends its KV, and emits the first token."""
DECODE = "decode"
"""Receives the prompt's KV, and emits the other tokens."""
AGGREGATED = "aggregated"
"""Computes the prompt and emits all tokens."""
EMBED = "embed"
"""Computes the prompt and returns its embedding."""


class Transfer(Enum):
    """The direction in which a leg transfers KV. RECEIVE: it fetches the KV that the leg before it sends."""

    NONE = auto()
    SEND = auto()
    RECEIVE = auto()


class Result(Enum):
    """The contribution of a leg to the answer itself. NONE: only later legs read what it computes."""

    NONE = auto()
    TOKENS = auto()
    EMBEDDING = auto()


@dataclass(frozen=True, kw_only=True)
class LegKind:
    """The properties of one kind of leg. num_tokens_before: tokens that earlier legs of the attempt emit.

    write: fills in the order that starts a leg.
    """

    write: Callable[[EngineRequest, pb.Order], object]
    transfer: Transfer = Transfer.NONE
    result: Result = Result.TOKENS
    num_tokens_before: int = 0


def _write_prefill(request: EngineRequest, order: pb.Order) -> None:
    prefill_to_proto(request, order.prefill)


def _write_decode(request: EngineRequest, order: pb.Order) -> None:
    decode_to_proto(request, order.decode)


def _write_embed(request: EngineRequest, order: pb.Order) -> None:
    embed_to_proto(request, order.embed)


LEG_KINDS: Mapping[str, LegKind] = MappingProxyType(
    {
        PREFILL: LegKind(write=_write_prefill, transfer=Transfer.SEND),
        DECODE: LegKind(write=_write_decode, transfer=Transfer.RECEIVE, num_tokens_before=1),
        AGGREGATED: LegKind(write=_write_decode),
        EMBED: LegKind(write=_write_embed, result=Result.EMBEDDING),
    }
)
"""The kinds of leg that this router places."""


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """The legs that a kind of request needs.

    legs: each leg's kind and the role of its worker, in order. alone: the kind of the one leg on a worker that has all
    roles. prefers_legs: such a worker is chosen only while no other one has room, and not because it is less busy.
    fallback: the plan for a request that was begun before, while no worker has the first role. named_roles: roles that an
    error names where they are missing, if these are not the roles of the legs.
    """

    legs: tuple[tuple[str, Role], ...]
    alone: str
    prefers_legs: bool = False
    fallback: "RequestPlan | None" = None
    named_roles: tuple[Role, ...] = ()

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the legs' workers, in order."""
        return tuple(role for _, role in self.legs)

    @cached_property
    def end_roles(self) -> tuple[Role, ...]:
        """The roles of the workers on which the request can end."""
        return self.roles[-1], Role.AGGREGATED

    @cached_property
    def emits_tokens(self) -> bool:
        """True if the answer consists of tokens."""
        return LEG_KINDS[self.alone].result is Result.TOKENS


RECOMPUTE = RequestPlan(
    legs=((AGGREGATED, Role.DECODE),), alone=AGGREGATED, named_roles=(Role.PREFILL, Role.DECODE)
)
"""An answer whose prompt the decode worker computes itself."""
GENERATION = RequestPlan(
    legs=((PREFILL, Role.PREFILL), (DECODE, Role.DECODE)), alone=AGGREGATED, fallback=RECOMPUTE
)
"""An answer whose KV is handed over."""
EMBEDDING = RequestPlan(legs=((EMBED, Role.PREFILL),), alone=EMBED, prefers_legs=True)
"""An embedding, which nothing is decoded for."""
CONTINUATION = RequestPlan(legs=((DECODE, Role.DECODE),), alone=DECODE)
"""An answer that is moved while it is decoded: the worker that decodes it lends its KV."""
PLANS = (GENERATION, RECOMPUTE, EMBEDDING, CONTINUATION)
"""The plans that a request may wait for."""


class LegPlan(msgspec.Struct, frozen=True):
    """One leg of a request. kind: a key of the table of kinds. worker: a worker id.

    first_index: index in the answer of the first token that the leg emits.
    """

    kind: str
    worker: str
    first_index: int = 0


class Placement(msgspec.Struct, frozen=True):
    """The legs of a request on chosen workers, in the order in which one takes over from the other."""

    legs: tuple[LegPlan, ...]

    @property
    def end(self) -> str:
        """Id of the worker that ends the request."""
        return self.legs[-1].worker

    @property
    def hand_over(self) -> tuple[str, str] | None:
        """Ids of the workers that send and receive the prompt's KV; None if no KV is handed over."""
        for sender, receiver in pairwise(self.legs):
            if LEG_KINDS[receiver.kind].transfer is Transfer.RECEIVE:
                return sender.worker, receiver.worker
        return None

    def worker_of(self, kind: str) -> str | None:
        """Return the id of the worker that has the leg of this kind; None without such a leg."""
        return next((leg.worker for leg in self.legs if leg.kind == kind), None)


def place_legs(*legs: tuple[str, str], num_delivered: int = 0) -> Placement:
    """Place legs, each a kind and a worker id, for an answer of which ``num_delivered`` tokens were delivered."""
    plans = [
        LegPlan(kind, worker, num_delivered + LEG_KINDS[kind].num_tokens_before) for kind, worker in legs
    ]
    return Placement(tuple(plans))
