"""B7: several clients of one engine, in processes of their own: each has its own outputs, and disturbs no other."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from contract.errors import InternalError, InvalidRequestError, NotFoundError, UnavailableError
from contract.outputs import FinishReason
from contract.requests import HandOff
from engine.attaching import AttachedClient
from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.connecting import Transfers
from roles.table import STAGES
from tests.engine_scheduling.attached_program import (
    NUM_MANY,
    NUM_MANY_TOKENS,
    answer_of,
    answers,
    own_prompt,
)
from tests.engine_scheduling.stepping import RECEIVE, fake_request, fake_settings
from tests.fakes.engine.fakes import CRASH_TOKEN, fake_answer, start_fake_executor
from tests.fakes.engine.transfer import fake_connector_factory
from tests.leftovers import Leftovers
from tests.processes import stop

KINDS = pytest.mark.parametrize("kind", [InProcessClient, ProcessClient])
Kind = type[InProcessClient] | type[ProcessClient]
Owner = InProcessClient | ProcessClient


@asynccontextmanager
async def engine(kind: Kind = InProcessClient, *, plan: Any = None, **changes: Any) -> AsyncIterator[Owner]:
    """Yield the client that has started an engine on fakes."""
    client = await kind.start(
        fake_settings(**changes),
        Transfers(fake_connector_factory, STAGES),
        start=start_fake_executor,
        **(plan or {}),
    )
    try:
        yield client
    finally:
        await client.shutdown()


@asynccontextmanager
async def attached(owner: Owner) -> AsyncIterator[AttachedClient]:
    """Yield a further client, in this process."""
    client = await AttachedClient.attach(await owner.share())
    try:
        yield client
    finally:
        await client.shutdown()


@contextmanager
def program(address: str, task: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a further client in a process of its own (``attached_program``)."""
    command = [sys.executable, "-m", "tests.engine_scheduling.attached_program", address, task]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def line_of(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    return json.loads(await asyncio.to_thread(process.stdout.readline))


async def num_generated(client: EngineClient) -> float:
    counters = await client.call("counters")
    return float(counters["generation_tokens_total"])


async def test_each_client_has_the_outputs_of_its_own_requests() -> None:
    """B7: three processes use the same names at once; their tokens are those of an engine with one client."""
    async with engine(ProcessClient, max_num_seqs=5) as owner:
        address = await owner.share()
        assert await owner.share() == address
        with program(address, "1") as one, program(address, "2") as two:
            own, of_one, of_two = await asyncio.gather(answers(owner, 3), line_of(one), line_of(two))
        for salt, answer in ((3, own), (1, of_one), (2, of_two)):
            assert answer == [fake_answer(own_prompt(salt, index), 40) for index in range(8)]
        await owner.until_free()
        await owner.call("check_integrity")


async def test_a_name_belongs_to_each_client_on_its_own() -> None:
    """B7: neither way of aborting a request ends the one that another client has under the same name."""
    async with asyncio.timeout(30), engine() as owner, attached(owner) as first, attached(owner) as second:
        waits = asyncio.create_task(answer_of(owner, fake_request("r", [1], transfer=RECEIVE)))
        await owner.call("stats")
        for client in (first, second):
            assert (await answer_of(client, fake_request("r", [2], 3)))[0] == fake_answer([2], 3)
            await client.abort("r")
            stream: Any = client.generate(fake_request("r", [3], 200))
            await anext(stream)
            await stream.aclose()
        assert await first.call("pid") == await owner.call("pid")
        assert not waits.done()
        goes_on = asyncio.create_task(answer_of(first, fake_request("r", [4], 200)))
        await asyncio.sleep(0)  # it is sent before the call
        await first.call("stats")
        await owner.abort("r")
        assert (await waits)[1].finish_reason is FinishReason.ABORT
        assert (await goes_on)[0] == fake_answer([4], 200)
        with pytest.raises(InvalidRequestError, match="running already"):
            await asyncio.gather(*(second.add_request(fake_request("s", [1], 200)) for _ in range(2)))


async def test_a_message_of_state_reaches_every_client() -> None:
    async with engine(plan={"idle_seconds": 0.01}) as owner, attached(owner) as client:
        client.idled.clear()
        async with asyncio.timeout(20):
            await client.idled.wait()
        assert client.info == owner.info and client.complaint is None
        assert client.stats == owner.stats


async def test_answers_of_calls_go_to_the_caller() -> None:
    """Calls have the same ids in all clients; ``until_free`` waits for the requests of all."""
    async with engine() as owner, attached(owner) as client:
        await owner.add_request(fake_request("waits", [1], transfer=RECEIVE))
        free = asyncio.create_task(client.until_free())
        state, stats = await asyncio.gather(owner.call("debug_state"), client.call("stats"))
        assert state["requests"] == {"WAITING_FOR_REMOTE_KVS": 1} and "num_running_reqs" in stats
        await client.prepare(fake_request("later", [1]))
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            await client.prepare(fake_request("later", [10**6]))
        assert not free.done()
        await owner.abort("waits")
        await free


async def test_only_the_client_that_started_the_engine_changes_it() -> None:
    order = HandOff(request_id="r", attempt=0, choice=0, transfer_id="t", next_attempt=1)
    async with engine() as owner, attached(owner) as client:
        for call in (
            client.reload_weights(),
            client.call("reset_prefix_cache"),
            client.hand_off(order, 1.0),
            client.share(),
        ):
            with pytest.raises(InvalidRequestError, match="only the client that started the engine"):
                await call
        with pytest.raises(InvalidRequestError, match="only the client that started"):
            await client.call("nothing")
        with pytest.raises(NotFoundError):
            await owner.call("nothing")
        _, last = await answer_of(client, fake_request("d", [1], transfer=RECEIVE))
        assert last.error_kind == "invalid_request" and "hands requests over" in (last.error_message or "")


async def test_an_engine_of_a_group_is_not_shared() -> None:
    async with engine(data_parallel_size=2) as owner:
        with pytest.raises(InvalidRequestError, match="data-parallel"):
            await owner.share()


@KINDS
async def test_a_client_that_leaves_takes_its_requests_along(kind: Kind) -> None:
    """Its ``shutdown`` ends its own requests only; the engine goes on, and accepts others."""
    async with engine(kind, max_num_seqs=1) as owner:
        async with attached(owner) as client:
            for index in range(NUM_MANY):
                await client.add_request(fake_request(f"r{index}", [1], NUM_MANY_TOKENS))
            running = asyncio.create_task(answer_of(client, fake_request("last", [1])))
            await client.call("stats")
        assert (await running)[1].error_kind == "cancelled"
        with pytest.raises(UnavailableError, match="has left"):
            await client.call("stats")
        assert not client.died.is_set()
        await owner.until_free()
        assert await num_generated(owner) < NUM_MANY * NUM_MANY_TOKENS
        async with attached(owner) as client:
            assert (await answer_of(client, fake_request("r", [5])))[0] == fake_answer([5], 4)


async def test_a_killed_client_costs_the_others_nothing() -> None:
    async with engine(max_num_seqs=1) as owner, attached(owner) as client:
        with program(await owner.share(), "many") as killed:
            assert await line_of(killed)
            others = asyncio.gather(answers(owner, 1), answers(client, 2))
            killed.kill()
            for salt, answer in enumerate(await others, 1):
                assert answer == [fake_answer(own_prompt(salt, index), 40) for index in range(8)]
        await owner.until_free()
        assert await num_generated(owner) < NUM_MANY * NUM_MANY_TOKENS
        await owner.call("check_integrity")


async def test_a_client_that_does_not_read_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """The steps never wait for it, and what waits for it is bounded; others have all their outputs."""
    async with engine(plan={"max_unread": 256}) as owner:
        with program(await owner.share(), "many") as stopped:
            assert await line_of(stopped)
            stop(stopped)
            await owner.until_free()
            assert "client 1 is dropped: it does not read, and 256 messages wait for it" in caplog.text
            assert await num_generated(owner) < NUM_MANY * NUM_MANY_TOKENS
            assert await answers(owner, 1) == [fake_answer(own_prompt(1, index), 40) for index in range(8)]
            stopped.send_signal(signal.SIGCONT)
            assert "internal" in await line_of(stopped), "it has noticed"


async def test_clients_share_the_steps_fairly() -> None:
    """A client with one request does not wait for all that another one has added before."""
    async with engine(max_num_seqs=1) as owner, attached(owner) as client:
        for index in range(60):
            await owner.add_request(fake_request(f"r{index}", [index], 20))
        assert (await answer_of(client, fake_request("r", [1], 20)))[0] == fake_answer([1], 20)
        assert (await owner.call("debug_state"))["requests"] != {}


async def test_an_engine_of_another_version_is_left(tmp_path: Path) -> None:
    """Its first message cannot be read: the client raises an error instead of waiting."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    async def open_door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        folder = (await reader.readline()).decode().strip()
        with context.socket(zmq.PUSH) as output:
            output.connect(f"ipc://{folder}/out")
            output.send(b"\x93")
            assert await reader.read() == b""
        writer.close()

    async with await asyncio.start_unix_server(open_door, tmp_path / "door"):
        with pytest.raises(InternalError, match="need the same version"):
            await AttachedClient.attach(str(tmp_path))
    await asyncio.to_thread(context.term)


async def test_a_client_that_sends_something_else_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as owner, attached(owner) as broken, attached(owner) as client:
        broken._link._sockets._input.send(b"\xc1")  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            await broken.died.wait()
        assert "cannot be read" in caplog.text
        assert (await answer_of(client, fake_request("r", [1])))[0] == fake_answer([1], 4)


async def test_what_no_client_would_say_opens_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with engine() as owner:
        address = await owner.share()
        for said in (b"", b"\xff\n", b"/nowhere/" + b"x" * 200 + b"\n"):
            reader, writer = await asyncio.open_unix_connection(f"{address}/door")
            writer.write(said)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        assert caplog.text.count("could not attach") == 2
        async with attached(owner) as client:
            assert (await answer_of(client, fake_request("r", [1])))[0] == fake_answer([1], 4)


@KINDS
async def test_all_clients_see_the_end_of_the_engine(kind: Kind) -> None:
    """Each request has its last output; nothing of the engine is left in this process."""
    before = Leftovers()
    async with engine(kind, max_num_seqs=1) as owner:
        address = await owner.share()
        async with attached(owner) as client:
            ends = [
                asyncio.create_task(answer_of(client, fake_request(f"r{n}", [1], 200))) for n in range(99)
            ]
            await asyncio.sleep(0)  # all are sent before the call
            await client.call("stats")
            await owner.shutdown()
            assert (await ends[-1])[1].finish_reason is FinishReason.ABORT
            await asyncio.gather(*ends)
            with pytest.raises(UnavailableError, match="shut down"):
                await client.add_request(fake_request("late", [1]))
            assert not client.died.is_set()
    with pytest.raises(UnavailableError, match="no engine is shared at"):
        await AttachedClient.attach(address)
    assert not Path(address).exists()
    assert before.threads("engine-clients") == []


@KINDS
async def test_all_clients_see_the_death_of_the_engine(kind: Kind) -> None:
    async with engine(kind) as owner, attached(owner) as client:
        await owner.add_request(fake_request("d", [1], transfer=RECEIVE))
        _, last = await answer_of(client, fake_request("crash", [CRASH_TOKEN]))
        assert last.error_kind == "internal" and "crashed" in (last.error_message or "")
        async with asyncio.timeout(20):
            await client.died.wait()
        with pytest.raises(UnavailableError, match="crashed"):
            await client.call("stats")
        assert client.complaint is not None


async def test_a_killed_engine_ends_the_requests_of_all_clients() -> None:
    """A8: without a last message; the folder of the socket is removed by the client that started the engine."""
    async with engine(ProcessClient) as owner:
        address = await owner.share()
        async with attached(owner) as client:
            waits = asyncio.create_task(client.until_free())
            await owner.add_request(fake_request("d", [1], transfer=RECEIVE))
            psutil.Process(await client.call("pid")).kill()
            async with asyncio.timeout(20):
                await client.died.wait()
            with pytest.raises(UnavailableError, match="has died"):
                await asyncio.gather(waits, client.call("stats"))
        await owner.shutdown()
        assert not Path(address).exists()
        with pytest.raises(UnavailableError, match="no engine is shared at"):
            await AttachedClient.attach(address)
