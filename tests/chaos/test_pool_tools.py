"""The comparison of answers, the report, the balancer and the count of descriptors of the chaos runs on a pool."""

import asyncio
import os
import socket
import subprocess
import sys
from collections import Counter
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chaos.pool.answers import Choice, MixedAnswer, Way, mistake_in
from tests.chaos.pool.balancer import running_balancer
from tests.chaos.pool.descriptors import descriptors_by_peer, grown, own_descriptors
from tests.chaos.pool.faults import Fault, Faults
from tests.chaos.pool.moves import Move, pauses_of_moves, results_of_moves
from tests.chaos.pool.questions import COMPLETIONS, Kind, MixedQuestion
from tests.chaos.pool.report import PoolReport, Stream, pauses_of
from tests.chaos.pool.rounding import depends_on_rounding
from tests.chaos.pool.transfers import transfer_seconds

TOKENS = [5, 6, 7, 8, 9]
LETTERS = {"a": 69, "b": 70, "c": 71}
"""Tokens of the demo model."""


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


class Scores:
    """A model that gives each token the same logit everywhere; it prefers one that no grammar below allows."""

    config = SimpleNamespace(vocab_size=1456)

    def __init__(self, **logits: float) -> None:
        self._logits = torch.zeros(self.config.vocab_size)
        self._logits[5] = 9.0
        for letter, logit in logits.items():
            self._logits[LETTERS[letter]] = logit

    def __call__(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits.expand(1, ids.shape[1], -1))


def test_an_answer_depends_on_rounding_if_models_differ_among_the_tokens_of_its_grammar() -> None:
    body = {"guided_regex": "[ab]{3}", "temperature": 0.0, "max_tokens": 3}
    answer = MixedAnswer(
        MixedQuestion(1, Kind.GRAMMAR, COMPLETIONS, body), Way.WHOLE, [Choice(token_ids=[LETTERS["a"]] * 3)]
    )
    clear = Scores(a=2.0, b=1.0, c=3.0)
    assert not depends_on_rounding(answer, [300], [clear, clear])
    assert depends_on_rounding(answer, [300], [clear, Scores(a=2.0, b=2.001, c=1.0)])
    with pytest.raises(AssertionError, match="token 0 is 69, but every model gives 70"):
        depends_on_rounding(answer, [300], [Scores(a=1.0, b=2.0)] * 2)


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


def test_the_first_gap_of_a_stream_is_no_step() -> None:
    assert Stream.of([0.0, 1.0, 1.25, 1.75]).gaps == [0.25, 0.5]


def a_move(
    pause: float = 0.2, source: str = "a", *targets: str, begin: float = 100.0, steps: int = 3
) -> Move:
    """Return a move as a router shows it: ordered at ``begin``, handed over half a second later."""
    times = {"ordered_at": begin, "handed_off_at": begin + 0.5, "pause_seconds": pause}
    record = {"request_id": f"{begin}", "choice": 0, "num_steps": steps}
    parts = {"waiting_seconds": 0.05, "fetching_seconds": 0.02, "queue_seconds": 0.03}
    copy = {"num_bytes": 1000, "copying_seconds": 0.01}
    return {"source": source, "targets": list(targets) or ["b"], **times, **record, **parts, **copy}


@pytest.mark.parametrize(
    ("workers", "begin", "end", "is_met"),
    [
        (["a"], 90.0, 100.1, True),
        (["b"], 100.6, 300.0, True),
        (["a"], 90.0, 100.0, False),
        (["b"], 100.7, 300.0, False),
        (["c"], 90.0, 300.0, False),
        (["a", "b"], 90.0, 300.0, True),
        (["a", "c"], 90.0, 300.0, False),
    ],
)
def test_a_fault_meets_a_move_only_at_its_ends_and_while_it_lasts(
    workers: list[str], begin: float, end: float, *, is_met: bool
) -> None:
    faults = Faults([Fault(frozenset({"other"}), 0.0), Fault(frozenset(workers), begin, end)])
    assert faults.have_met(a_move()) is is_met


def test_a_fault_of_any_target_has_met_the_move() -> None:
    assert Faults([Fault(frozenset({"b"}), 100.5, 101.0)]).have_met(a_move(0.3, "a", "b", "c"))


def test_faults_last_as_long_as_their_block_and_as_they_must_at_least() -> None:
    faults = Faults()
    with faults.on("a"):
        assert faults.all[0].end == inf
    with faults.on("b", at_least_seconds=60.0):
        pass
    assert faults.all[0].end < faults.all[1].begin
    assert faults.all[1].end == faults.all[1].begin + 60.0


def test_moves_that_a_fault_has_met_are_bounded_like_kills_and_others_by_steps_of_the_run() -> None:
    moves = [a_move(0.2, steps=2), a_move(0.4, "a", "c"), a_move(2.5, "a", "killed", "b")]
    faults = Faults([Fault(frozenset({"killed"}), 0.0)])
    found = pauses_of_moves(moves, faults, [0.02] * 98 + [0.1] * 2)
    assert (found["met_by_a_fault"]["max"], found["met_by_a_fault"]["bound"]) == (2.5, 3.0)
    others = found["others"]
    assert (others["count"], others["max"], others["added_p99"]) == (2, 0.4, 0.38)
    assert (others["num_steps"]["p50"], others["num_steps"]["max"], others["transfer_p99"]) == (2, 3, 0.01)
    assert (others["bound"], others["bound_with_the_usual_gap"]) == (0.31, 0.07)
    assert found["met_by_a_fault"]["is_within_bound"] and not others["is_within_bound"]
    assert pauses_of_moves(moves, faults, [0.001])["others"]["bound"] == 0.06, "50 ms are always allowed"
    assert "met_by_a_fault" not in pauses_of_moves(moves, Faults(), [0.02])
    assert pauses_of_moves([], faults, [0.02]) == {}


def test_the_time_of_a_transfer_is_that_of_the_bytes_in_front_of_it_on_its_link() -> None:
    """A copy that was held up counts by its bytes. Other links, and moves that are over or end later, are not in front."""
    first, second, last = (a_move(pause) for pause in (0.2, 0.3, 0.9))
    over = {**a_move(0.1), "handed_off_at": first["handed_off_at"] - 5.0}
    elsewhere = a_move(0.25, "a", "c")
    from_another = {**a_move(0.25, "x"), "num_bytes": 10, "copying_seconds": 0.05}
    held_up = {**last, "num_bytes": 3000, "copying_seconds": 0.06}
    cached = {**a_move(0.2, "y"), "num_bytes": 0, "copying_seconds": 0.0}
    found = transfer_seconds([first, second, held_up, over, elsewhere, from_another, cached])
    rate = 7000 / (4 * 0.01 + 0.06)  # of all that "a" has sent
    assert found == pytest.approx([1000 / rate, 2000 / rate, 5000 / rate, *[1000 / rate] * 2, 0.05, 0.0])
    assert transfer_seconds([]) == []


def test_answers_that_moved_together_are_one_group() -> None:
    """Their pauses are not independent: all of a group wait for the same steps."""
    together = [a_move(pause, "a", "b") for pause in (0.2, 0.9, 0.3)]
    later = {**a_move(0.5, "a", "b"), "handed_off_at": together[0]["handed_off_at"] + 5.0}
    elsewhere = a_move(0.6, "a", "c", "d")
    others = pauses_of_moves([later, *together, elsewhere], Faults(), [0.02])["others"]
    assert others["num_groups"] == 3
    slowest = [
        (group["way"], group["count"], group["p50"], group["max"]) for group in others["slowest_groups"]
    ]
    assert slowest == [("a -> b", 3, 0.3, 0.9), ("a -> c -> d", 1, 0.6, 0.6), ("a -> b", 1, 0.5, 0.5)]
    parts = {"handing_off": 0.5, "waiting": 0.05, "fetching": 0.02, "queue": 0.03, "other": 0.8}
    assert others["slowest_groups"][0]["parts"] == parts


def test_moves_are_counted_by_result() -> None:
    text = 'kvbaton_migrations_total{reason="drain",result="moved"} 10.0'
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
            for_each_other = descriptors_by_peer({"us": [us], "child": [child.pid]})
            assert for_each_other["child"]["us"] == {"socket": 3, "memfd": 2, "pidfd": 1}
            assert for_each_other["us"]["child"] == {"socket": 3}
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
