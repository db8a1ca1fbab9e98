"""The latency split."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.identity import Role
from contract.outputs import TransferReport
from protos import worker_pb2 as pb
from router.answers.timings import Stopwatch, Timings
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, byte_ids

MOVED: dict[str, Any] = {"transfer_bytes": 4096, "transfer_pieces": 3, "transfer_copying": 0.75}
INTAKE: dict[str, Any] = {"intake": 0.25, "placement": 0.125}
OF_QUEUE = ("intake", "placement", "worker", "engine_queue", "messages")
seconds = st.floats(0, 1000, allow_nan=False)


@given(
    *(seconds, seconds, seconds, seconds, st.integers(1, 3)),
    st.lists(seconds, min_size=5, max_size=5),
    st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_the_parts_are_never_negative_and_sum_to_the_whole(
    arrival: float,
    first: float,
    second: float,
    rest: float,
    num_tokens: int,
    reported: list[float],
    marks: list[float],
) -> None:
    watch = Stopwatch(arrival)
    watch.prefill_seconds, watch.engine_queue_seconds, watch.held_seconds = reported[0], *reported[3:]
    for at, note in zip(sorted(marks), (watch.on_queued, watch.on_bound, watch.on_bound), strict=True):
        note(arrival + first * at)
    watch.transfer = TransferReport(reported[1], reported[2], 4096, 3, 0.75)
    watch.on_tokens(0, 1, arrival + first)
    finish = arrival + first
    if num_tokens > 1:
        watch.on_tokens(1, num_tokens - 1, arrival + first + second)
        finish = arrival + first + second + rest
    timings = watch.split(finish)
    parts = (timings.queue, timings.prefill, timings.transfer, timings.first_decode_step, timings.decode)
    of_queue = [getattr(timings, part) for part in OF_QUEUE]
    assert min(*parts, *of_queue) >= 0, timings
    assert sum(of_queue) == timings.queue
    assert sum(parts) == timings.end_to_end == timings.as_dict()["end_to_end"]
    assert timings.end_to_end == pytest.approx(finish - arrival, abs=1e-6)
    assert (timings.transfer_hidden, timings.transfer_bytes) == (reported[2], 4096)


def split(num_tokens: int, prefill: float, exposed: float) -> Timings:
    watch = Stopwatch(10.0)
    watch.on_queued(10.25)
    watch.on_bound(10.375)
    watch.engine_queue_seconds = 0.125
    watch.held_seconds = prefill + 0.125 + 0.25
    watch.prefill_seconds, watch.transfer = prefill, TransferReport(exposed, 0.25, 4096, 3, 0.75)
    watch.on_tokens(0, 1, 14.0)
    if num_tokens > 1:
        watch.on_tokens(1, 1, 16.0)
    return watch.split(19.0)


def test_worked_example() -> None:
    assert split(3, prefill=3.0, exposed=0.5) == Timings(
        **INTAKE,
        worker=0.25,
        engine_queue=0.125,
        messages=0.25,
        prefill=3.0,
        transfer=0.5,
        first_decode_step=1.5,
        decode=3.0,
        transfer_hidden=0.25,
        **MOVED,
    )


def test_what_a_worker_reports_is_cut_to_our_interval() -> None:
    assert split(3, prefill=99.0, exposed=99.0) == Timings(
        **INTAKE,
        worker=0.0,
        engine_queue=0.0,
        messages=0.0,
        prefill=3.625,
        transfer=2.0,
        first_decode_step=0.0,
        decode=3.0,
        transfer_hidden=0.25,
        **MOVED,
    )


def test_an_answer_of_one_token_has_no_transfer() -> None:
    assert split(1, prefill=3.0, exposed=0.5) == Timings(
        **INTAKE,
        worker=0.25,
        engine_queue=0.125,
        messages=0.25,
        prefill=3.0,
        transfer=0.0,
        first_decode_step=0.0,
        decode=5.0,
        transfer_hidden=0.25,
        **MOVED,
    )


def test_what_failed_before_the_first_token_counts_as_placement() -> None:
    """Another attempt is queued and bound again; after the first token a replay changes nothing of the way to it."""
    watch = Stopwatch(1.0)
    for now in (2.0, 3.0):
        watch.on_queued(now)
        watch.on_bound(now + 0.5)
    watch.on_tokens(0, 1, 4.0)
    watch.on_queued(5.0)
    watch.on_bound(6.0)
    found = watch.split(7.0)
    assert (found.intake, found.placement, found.messages) == (1.0, 1.5, 0.5)


def test_tokens_that_come_in_one_piece() -> None:
    watch = Stopwatch(1.0)
    watch.on_tokens(0, 4, 3.0)
    assert watch.split(3.0).end_to_end == 2.0
    assert (watch.token_0, watch.token_1) == (3.0, 3.0)


async def timings_of(waited: float, computed: float, held: float = 0.0) -> dict[str, float]:
    """Return the timings of an answer whose worker reports these seconds: before its first step, in the prompt, in all."""
    report = pb.LegTimings(queue_seconds=waited, prefill_seconds=computed, held_seconds=held)
    async with running_cluster(Script(tokens=byte_ids(b"a"), timings=report), (Role.AGGREGATED,)) as cluster:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "timings": True}
        _, answer = await cluster.post("/v1/chat/completions", body)
    timings: dict[str, float] = answer["kvbaton"]["timings"]
    assert timings["queue"] == sum(timings[part] for part in OF_QUEUE)
    assert min(timings["intake"], timings["placement"]) > 0
    return timings


async def test_what_a_worker_reports_is_no_part_of_the_messages() -> None:
    found = await timings_of(waited=2.0**-20, computed=2.0**-19, held=2.0**-17)
    assert (found["engine_queue"], found["prefill"]) == (2.0**-20, 2.0**-19)
    assert found["worker"] == 2.0**-17 - 2.0**-19 - 2.0**-20
    assert found["messages"] > 0


@pytest.mark.parametrize("reported", [(999.0, 0.0, 0.0), (0.0, 999.0, 0.0), (0.0, 0.0, 999.0)])
async def test_a_worker_cannot_report_more_than_the_time_to_the_first_token(
    reported: tuple[float, float, float],
) -> None:
    found = await timings_of(*reported)
    assert found["messages"] == 0
    assert max(found["engine_queue"], found["prefill"], found["worker"]) < 999


async def test_a_worker_that_reports_no_handling_has_none() -> None:
    """A worker of an earlier version: its handling is a part of the messages."""
    found = await timings_of(waited=2.0**-20, computed=2.0**-19)
    assert found["worker"] == 0 < found["messages"]


async def test_a_request_header_asks_for_the_split_as_a_response_header() -> None:
    script = Script(tokens=[*byte_ids(b"abc"), END])
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        url = cluster.url("/v1/completions")
        body = {"prompt": ["x", "y"], "timings": True}
        async with cluster.session.post(url, json=body, headers={"x-kvbaton-timings": "true"}) as response:
            timings = (await response.json())["kvbaton"]["timings"]
            header = response.headers["Server-Timing"]
        async with cluster.session.post(url, json=body) as response:
            assert "Server-Timing" not in response.headers
    found = dict(part.split(";dur=") for part in header.split(", "))
    names = ["queue", *OF_QUEUE]
    names += ["prefill", "transfer", "first_decode_step", "decode", "end_to_end"]
    assert list(found) == names
    assert all(float(found[name]) == pytest.approx(timings[name] * 1000, abs=0.001) for name in names)
