"""The orders of a router: legs to start, requests to cancel, and what concerns the worker itself."""

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from contract.errors import InternalError, KvbatonError
from contract.outputs import EngineOutput, FinishReason
from contract.requests import MAX_CHOICES, EngineRequest
from protos import worker_pb2 as pb
from wire.legs import cancel_from_proto, decode_from_proto, embed_from_proto, prefill_from_proto
from wire.membership import drain_from_proto, role_change_from_proto
from wire.numbers import BadNumberError
from worker.draining import Drain
from worker.flipping import Flip
from worker.lifecycle import LegCall, Lifecycle
from worker.pooling import pooling_of

logger = logging.getLogger(__name__)


class Requests(Protocol):
    """The requests of a worker."""

    @property
    def lifecycle(self) -> Lifecycle:
        """The worker's state and role."""

    @property
    def model_folder(self) -> Path:
        """The model's folder."""

    def accept(self, request: EngineRequest, session: str) -> Coroutine[Any, Any, None]:
        """Accept a leg whose tokens are sent on the stream of this session. Raises KvbatonError."""

    def cancel(self, request_id: str, attempt: int, choice: int | None = None) -> Coroutine[Any, Any, None]:
        """Cancel a choice of a request (None: all) up to this attempt. Unknown ones are ignored."""


class Orders:
    """Carries out the messages of routers, those of one stream in the sequence in which they were sent."""

    def __init__(self, requests: Requests, drain: Drain, flip: Flip) -> None:
        self._requests = requests
        self._drain = drain
        self._flip = flip

    async def carry_out(self, message: pb.RouterMessage, session: str) -> list[EngineOutput]:
        """Carry out a message that came on this session's stream, and return an output for each choice that is rejected.

        A message of a later version is ignored, and so is one about the worker itself that comes too late. Raises
        BadNumberError for a number out of its range, but for one of a leg, which is rejected.
        """
        try:
            match message.WhichOneof("message"):
                case "orders":
                    return await self._carry_out_all(message.orders, session)
                case "drain":
                    self._drain.begin(drain_from_proto(message.drain).deadline_seconds, by="a router")
                case "undrain":
                    self._drain.undo(by="a router")
                case "role_change":
                    self._flip.begin(role_change_from_proto(message.role_change))
        except BadNumberError:
            raise
        except KvbatonError as error:
            logger.info("ignored an order of the router: %s", error.message)
        return []

    async def _carry_out_all(self, orders: pb.Orders, session: str) -> list[EngineOutput]:
        rejected: list[EngineOutput] = []
        for order in orders.orders:
            match order.WhichOneof("order"):
                case "prefill":
                    rejected += await self._start(LegCall.PREFILL, order.prefill, session)
                case "decode":
                    rejected += await self._start(LegCall.DECODE, order.decode, session)
                case "embed":
                    rejected += await self._start(LegCall.EMBED, order.embed, session)
                case "cancel":
                    await self._requests.cancel(*cancel_from_proto(order.cancel))
        return rejected

    async def _start(
        self, call: LegCall, leg: pb.PrefillRequest | pb.DecodeRequest | pb.EmbedLegRequest, session: str
    ) -> list[EngineOutput]:
        """Accept a leg that the worker's role serves, or return the outputs of its rejection."""
        try:
            lifecycle = self._requests.lifecycle
            if not lifecycle.serves(call):
                raise InternalError(f"a {lifecycle.role.value} worker does not serve {call.value}")
            await self._requests.accept(await self._request_of(leg), session)
        except KvbatonError as error:
            return rejections(leg.task, error)
        return []

    async def _request_of(
        self, leg: pb.PrefillRequest | pb.DecodeRequest | pb.EmbedLegRequest
    ) -> EngineRequest:
        match leg:
            case pb.PrefillRequest():
                return prefill_from_proto(leg)
            case pb.DecodeRequest():
                return decode_from_proto(leg)
            case _:
                pooling = await asyncio.to_thread(pooling_of, self._requests.model_folder)
                return embed_from_proto(leg, pooling)


def rejections(task: pb.Task, error: KvbatonError) -> list[EngineOutput]:
    """Return the outputs with which a leg is rejected: one for each of its choices, up to ``MAX_CHOICES``."""
    return [
        EngineOutput(
            request_id=task.request_id,
            attempt=task.attempt,
            choice=choice,
            finish_reason=FinishReason.ERROR,
            error_kind=error.kind.value,
            error_message=error.message,
            error_param=error.param,
            is_rejected=True,
        )
        for choice in range(task.choice, task.choice + max(1, min(task.num_choices, MAX_CHOICES)))
    ]
