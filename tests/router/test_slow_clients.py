"""A client that does not read occupies bounded memory and no worker's credit."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import CancelledError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.tokens.inbox import Inbox, UnreadBytes
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, nothing_is_left
from tests.text.tiny_model import END, byte_ids

LONG = byte_ids(b"x" * 900)


@contextmanager
def unread_stream(cluster: Cluster, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request for a stream and read nothing."""
    payload = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(payload)}\r\n\r\n"
    host, port = cluster.service.addresses.http.split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + payload)
        yield


def _script(task: pb.Task) -> Script:
    best = {token: -0.1 * token for token in range(5, 10)}
    is_hog = task.sampling.HasField("logprobs")
    return Script(tokens=[*(LONG if is_hog else byte_ids(b"ok")), END], tokens_per_step=30, logprobs=best)


@pytest.mark.parametrize("roles", [(Role.PREFILL, Role.DECODE), (Role.AGGREGATED,)])
async def test_legs_that_have_ended_are_unbound_however_slowly_clients_read(roles: tuple[Role, ...]) -> None:
    """H5: two unread streams with n = 128 and logprobs hold no credit, and others are answered."""
    many = {"prompt": "x", "n": 128, "logprobs": 5, "max_tokens": 180}
    async with running_cluster(_script, (), client_stall_seconds=600) as cluster:
        for role in roles:
            await cluster.add(role, max_model_len=1000)
        await cluster.service.wait_ready()
        with ExitStack() as open_streams:
            for _ in range(2):
                open_streams.enter_context(unread_stream(cluster, TEXT, many))
            await cluster.until(lambda state: sum(w["num_legs"] for w in state["workers"]) >= 128)
            await cluster.until(lambda state: all(w["num_legs"] == 0 for w in state["workers"]))
            assert any((await cluster.debug_state())["requests"].values())
            async with asyncio.timeout(60):
                status, answer = await cluster.post(TEXT, {"prompt": "x"})
            assert (status, answer["choices"][0]["text"]) == (200, "ok")
        await cluster.until(lambda state: not any(state["requests"].values()))
        await nothing_is_left(cluster)


def test_the_answers_of_one_request_share_a_bound() -> None:
    """H5: each of 128 answers stays below its own bound, but the request exceeds the common one and is ended."""
    unread, ended = UnreadBytes(1000, 10**9), []
    with unread.open("") as account:
        boxes = [Inbox[str](account, 1000, lambda: ended.append(1)) for _ in range(128)]
        for box in boxes:
            box.put("token", 900)
        assert len(ended) == 128
        assert account.num_bytes == 0


@given(
    puts=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 400), st.booleans()), max_size=200
    )
)
def test_no_more_than_the_total_is_ever_unread(puts: list[tuple[int, int, int, bool]]) -> None:
    """H5: for any order of events the sum stays within the bound and equals the unread bytes."""

    async def walk() -> None:
        unread = UnreadBytes(600, 2000)
        with ExitStack() as stack:
            accounts = [stack.enter_context(unread.open(f"tenant-{number % 2}")) for number in range(6)]
            boxes = [[Inbox[str](account, 600, lambda: None) for _ in range(4)] for account in accounts]
            held: dict[tuple[int, int], list[int]] = {}
            for request, choice, size, is_read in puts:
                box, waiting = boxes[request][choice], held.setdefault((request, choice), [])
                if is_read and waiting and not box.is_overfull:
                    assert await box.get() == "token"
                    waiting.pop(0)
                else:
                    box.put("token", size)
                    waiting.append(size)
                assert unread.num_bytes <= 2000
                for (r, c), sizes in held.items():
                    if boxes[r][c].is_overfull:
                        sizes.clear()
                assert unread.num_bytes == sum(map(sum, held.values()))
        assert unread.num_bytes == 0

    asyncio.run(walk())


async def test_the_tenant_that_holds_most_is_ended_first() -> None:
    unread = UnreadBytes(1000, 1500)
    with unread.open("hog") as one, unread.open("hog") as two, unread.open("other") as other:
        boxes = [Inbox[str](account, 1000, lambda: None) for account in (one, two, other)]
        for box, size in zip(boxes, (500, 400, 450), strict=True):
            box.put("token", size)
        boxes[2].put("token", 200)
        assert [box.is_overfull for box in boxes] == [True, False, False]
        with pytest.raises(CancelledError, match="reads too slowly"):
            await boxes[0].get()
        assert await boxes[2].get() == "token"
