"""The comparison of answers, the report, the balancer and the count of descriptors of the chaos runs on a pool."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from tests.chaos.pool.answers import Choice, MixedAnswer, Way, mistake_in
from tests.chaos.pool.balancer import running_balancer
from tests.chaos.pool.descriptors import grown, own_descriptors
from tests.chaos.pool.moves import bucket_quantiles, pauses_of_moves, results_of_moves
from tests.chaos.pool.questions import COMPLETIONS, Kind, MixedQuestion
from tests.chaos.pool.report import PoolReport, Stream, pauses_of

TOKENS = [5, 6, 7, 8, 9]


def answer(error: str = "", status: int = 200, **choice: Any) -> MixedAnswer:
    given = {"token_ids": list(TOKENS), "text": "abcde", "finish_reason": "length", **choice}
    question = MixedQuestion(3, Kind.GREEDY, COMPLETIONS, {})
    return MixedAnswer(question, Way.WHOLE, [Choice(**given)], status=status, error=error)


@pytest.mark.parametrize(
    ("heard", "word"),
    [
        (answer(), None),
        (answer("broken", token_ids=[5, 6], text="ab", finish_reason=""), None),
        (answer(token_ids=[5, 6, 6, 7, 8, 9]), "duplicated"),
        (answer(token_ids=[5, 6, 7, 8, 9, 9]), "duplicated"),
        (answer(token_ids=[5, 6, 8, 9]), "missing"),
        (answer(token_ids=[5, 6, 7, 8]), "missing"),
        (answer(token_ids=[5, 6, 0, 8, 9]), "changed"),
        (answer("broken", token_ids=[5, 0], text="", finish_reason=""), "changed"),
        (answer(text="abcdf"), "changed"),
        (answer(finish_reason="stop"), "changed"),
        (answer(calls={0: "f{}"}), "changed"),
    ],
)
def test_another_answer_is_a_mistake_and_a_beginning_before_an_error_is_none(
    heard: MixedAnswer, word: str | None
) -> None:
    found = mistake_in(heard, answer())
    assert (found is None) == (word is None)
    assert word is None or f": {word}" in (found or "")


def test_log_probabilities_may_differ_by_rounding_only() -> None:
    right = answer(logprobs=[-1.0, -2.0])
    assert mistake_in(answer(logprobs=[-1.0001, -2.0]), right) is None
    assert "changed" in (mistake_in(answer(logprobs=[-1.01, -2.0]), right) or "")
    assert "missing" in (mistake_in(answer(logprobs=[-1.0]), right) or "")


def test_the_report_tells_failures_from_refusals_and_dead_routers() -> None:
    report = PoolReport()
    report.take(answer(), answer(), router_died=False)
    report.take(answer("gone", 0, token_ids=[], text="", finish_reason=""), answer(), router_died=True)
    refused = answer("no worker", 503, token_ids=[], text="", finish_reason="")
    report.take(refused, answer(), router_died=False, router_is_new=True)
    assert report.is_clean
    report.take(refused, answer(), router_died=False)
    assert report.failed.pop().endswith("(status 503): no worker")
    report.take(answer("gone", 200, token_ids=[5], text="", finish_reason=""), answer(), router_died=False)
    assert (len(report.failed), report.num_lost_with_router, report.num_refused) == (1, 1, 1)
    report.take(answer(token_ids=[5, 6, 6, 7, 8, 9]), answer(), router_died=True)
    assert (report.num_duplicated, report.num_missing, len(report.wrong)) == (1, 0, 1)
    assert report.as_dict()["num_whole"] == {"greedy": 1}


def test_a_pause_counts_for_the_events_that_its_stream_was_open_at() -> None:
    streams = [Stream.of([0.0, 1.0, 4.0, 4.5]), Stream.of([3.0, 3.25]), Stream.of([9.0, 9.1])]
    found = pauses_of(streams, [("kill", 2.0), ("late", 8.5)], quiet_from=0.0, quiet_seconds=0.5)
    assert found["kill"] == {"count": 1, "p50": 3.0, "p99": 3.0, "max": 3.0, "added_p99": 2.0}
    assert found["quiet"]["max"] == 1.0
    assert "late" not in found


def test_quantiles_of_a_histogram_are_those_of_all_processes() -> None:
    texts = [
        'h_bucket{le="0.1"} 60.0\nh_bucket{le="1.0"} 99.0\nh_bucket{le="+Inf"} 99.0\n',
        'h_bucket{le="0.1"} 0.0\nh_bucket{le="1.0"} 1.0\nh_bucket{le="+Inf"} 1.0\n',
    ]
    assert bucket_quantiles(texts, "h") == {"count": 100, "p50_at_most": 0.1, "p99_at_most": 1.0}
    assert bucket_quantiles(['h_bucket{le="+Inf"} 0.0'], "h") == {} == bucket_quantiles([], "h")


def test_the_pauses_of_moves_are_compared_with_steps_and_transfers() -> None:
    buckets = [
        'kvbaton_migration_pause_seconds_bucket{le="0.1"} 9.0',
        'kvbaton_migration_pause_seconds_bucket{le="0.5"} 10.0',
        'kvbaton_migration_pause_seconds_bucket{le="+Inf"} 10.0',
        'kvbaton_request_transfer_time_seconds_bucket{le="0.01"} 5.0',
        'kvbaton_request_transfer_time_seconds_bucket{le="+Inf"} 5.0',
        'kvbaton_migrations_total{result="moved"} 10.0',
    ]
    text = "\n".join(buckets)
    found = pauses_of_moves([text], [0.03, 0.02, 0.04])
    assert (found["p50_at_most"], found["p99_at_most"], found["bound"]) == (0.1, 0.5, 0.1)
    assert pauses_of_moves([text], [0.001])["bound"] == 0.06
    assert pauses_of_moves([], [0.03]) == {}
    assert results_of_moves([text, text]) == {"moved": 20}


async def test_the_balancer_skips_a_dead_backend_and_knows_who_served_whom() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    backends = {"http": {"dead": "127.0.0.1:1", "alive": f"{host}:{port}"}, "grpc": {"other": "127.0.0.1:1"}}
    async with running_balancer(backends) as balancer, balancer.door("http") as door:
        for number in range(3):
            there, _, own = door.address.rpartition(":")
            reader, writer = await asyncio.open_connection(there, int(own))
            writer.write(b"hello\n")
            assert await reader.read() == b"hello\n"
            assert door.served_by == ["alive"] * (number + 1)
            writer.close()
    server.close()


CHILD = """
import os, socket, sys
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(2)]
kept += [os.pidfd_open(os.getppid()), *os.pipe()]
print("ready", flush=True)
sys.stdin.read()
"""


def test_descriptors_are_set_aside_only_for_connections_to_living_processes() -> None:
    """A child connects twice to this process, and watches it by a pidfd, as a reader over shm does."""
    us = os.getpid()
    before = own_descriptors({"us": [us]})["us"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", CHILD, str(server.getsockname()[1])]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
            accepted = [server.accept()[0] for _ in range(2)]
            assert child.stdout and child.stdout.readline() == "ready\n"
            both = own_descriptors({"us": [us], "child": [child.pid]})
            assert both["child"]["socket"] == -1 and both["child"]["memfd"] == -2  # what a reader would have
            assert both["child"]["pidfd"] == 0
            alone = own_descriptors({"child": [child.pid]})["child"]
            assert grown(alone, both["child"]) == {"socket": (-1, 2), "memfd": (-2, 0), "pidfd": (0, 1)}
            with_child = both["us"]
            assert (
                with_child["socket"] == before["socket"] + 1 - 1
            )  # the server; and the sender's end over shm
        left = own_descriptors({"us": [us]})["us"]
        assert grown(left, before) == {"socket": (before["socket"], before["socket"] + 3)}
        for each in accepted:
            each.close()
    assert grown(own_descriptors({"us": [us]})["us"], before) == {}
    assert grown(Counter(socket=2), Counter(socket=2)) == {}
