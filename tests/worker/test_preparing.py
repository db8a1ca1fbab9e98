"""A worker prepares for an answer that is going to be moved to it."""

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from contract.identity import Role
from engine.client import InProcessClient, ProcessClient
from protos import worker_pb2 as pb
from tests.worker.test_worker import Running, running, task


def grammar_task(pattern: str = "[a-f]{6}", **fields: Any) -> pb.Task:
    made = task(**fields)
    made.sampling.grammar.CopyFrom(pb.Grammar(kind="regex", text=pattern))
    return made


async def code_of(running: Running, request: pb.Task) -> grpc.StatusCode:
    try:
        await running.call("Prepare", pb.DecodeRequest(task=request))
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("client", [InProcessClient, ProcessClient])
async def test_the_call_ends_when_the_grammar_is_compiled_or_has_failed(
    tmp_path: Path, client: type[InProcessClient | ProcessClient]
) -> None:
    """Nothing is left of it but the cached grammar: no request, and no block."""
    async with running(Role.DECODE, tmp_path, client) as worker:
        assert await code_of(worker, grammar_task()) is grpc.StatusCode.OK
        assert await code_of(worker, grammar_task()) is grpc.StatusCode.OK, "it is cached now"
        assert await code_of(worker, grammar_task("[")) is grpc.StatusCode.OK, "the leg will say why"
        assert await code_of(worker, task()) is grpc.StatusCode.OK, "there is no grammar"
        assert await code_of(worker, pb.Task()) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(worker, grammar_task(first_index=9)) is grpc.StatusCode.INVALID_ARGUMENT
        state = await worker.worker.debug_state()
        assert worker.worker.num_requests == 0 and not state["requests"]
