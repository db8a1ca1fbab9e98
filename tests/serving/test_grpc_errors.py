"""An error that nobody is left to hear."""

import asyncio

import grpc.aio
import pytest

from contract.errors import DeadlineError
from serving.grpc_errors import abort


class EndedCall:
    """What gRPC's context does where the call ended a moment before, and the event loop has not heard of it yet."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError("Failed to execute a batch")


async def test_a_call_that_has_ended_cannot_be_told_its_error_which_is_no_bug() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(EndedCall(), DeadlineError("too late"))
