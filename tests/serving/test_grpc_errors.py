"""An error for a call that has ended."""

import asyncio

import grpc.aio
import pytest

from contract.errors import DeadlineError
from serving.errors import abort


class EndedCall:
    """gRPC's context after a call has ended, before the event loop is notified."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.InternalError("Failed to execute a batch")


async def test_a_call_that_has_ended_cannot_be_told_its_error_which_is_no_bug() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(EndedCall(), DeadlineError("too late"))
