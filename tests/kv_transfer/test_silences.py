"""A queue of reads from a source that is silent costs one time-out, not one each; a source that answers again is read."""

from collections.abc import Sequence
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import ErrorKind
from contract.identity import Role
from engine.connector import FirstToken
from kv_transfer.data.reading import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Silences
from kv_transfer.protocol.reads import PeerSilentError, Read, ReadRequest, Source
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import Pair, hand_over, prompt_of, settings_for, worker
from tests.kv_transfer.faulty_network import Way, free_port, relay_to

NUM_QUEUED = 12
SOURCE = Source("p", "boot", "127.0.0.1:1", "token", "tcp")


class Counting:
    """A receiver that counts the reads that reach the network, and the seconds that they took."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport) -> None:
        self._inner, self.num_reads = inner, 0

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self.num_reads += 1
        self._inner.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        self._inner.forget(source)

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("way", [Way.SWALLOW, Way.SWALLOW_BACK])
def test_queued_reads_of_a_silent_data_port_cost_one_time_out(way: Way) -> None:
    """P8: the first read finds out; those behind it, and the second try of each, do not reach the network."""
    control, data, made = free_port(), free_port(), list[Counting]()

    def count(inner: ReceiverTransport) -> ReceiverTransport:
        made.append(Counting(inner))
        return made[-1]

    prefill = settings_for(
        "p", Role.PREFILL, control_port=control, data_port=data, advertise_host="127.0.0.2"
    )
    decode = settings_for("d", Role.DECODE, read_timeout_seconds=0.5, decorate=count)
    with (
        worker(prefill) as p,
        worker(decode) as d,
        relay_to(f"127.0.0.1:{control}", "127.0.0.2", control),
        relay_to(f"127.0.0.1:{data}", "127.0.0.2", data) as on_data,
    ):
        on_data.way = way
        pair, driver = Pair(p, d), d.driver
        fetches = [pair.fetch_request(f"r{number}", prompt_of(1)) for number in range(NUM_QUEUED)]
        for number, fetch in enumerate(fetches):
            p.driver.send_all(pair.send_request(f"r{number}", prompt_of(1)), [number], [FirstToken(1)])
            driver.receiver.start_fetch(fetch)
        driver.wait_for(lambda: len(driver.published) == NUM_QUEUED, "published")
        for number, fetch in enumerate(fetches):
            driver.receiver.receive_into(fetch.key, [30 + number], 0)
        driver.wait_for(lambda: len(driver.failed) == NUM_QUEUED, "failed")
        assert {driver.failed[fetch.key].kind for fetch in fetches} == {ErrorKind.PEER_UNREACHABLE}
        assert made[0].num_reads == 1


def test_a_source_that_is_refused_at_once_is_tried_again() -> None:
    """P8: only a wait adds up; what breaks at once is read again, so that a cut is healed."""
    control, data = free_port(), free_port()
    prefill = settings_for(
        "p", Role.PREFILL, control_port=control, data_port=data, advertise_host="127.0.0.2"
    )
    with (
        worker(prefill) as p,
        worker(settings_for("d", Role.DECODE)) as d,
        relay_to(f"127.0.0.1:{control}", "127.0.0.2", control),
        relay_to(f"127.0.0.1:{data}", "127.0.0.2", data) as on_data,
    ):
        pair = Pair(p, d)
        hand_over(pair, "before")
        on_data.cut()
        on_data.way = Way.PASS
        hand_over(pair, "after")


def test_a_trial_reopens_the_source_and_each_further_silence_doubles_the_pause() -> None:
    """P8: one read tries; its answer ends the pause for all."""
    now = [0.0]
    silences = Silences(clock=lambda: now[0])
    silences.check(SOURCE)
    pause = FIRST_PAUSE_SECONDS
    for _ in range(6):
        silences.record(SOURCE, PeerSilentError("no byte"))
        with pytest.raises(PeerSilentError, match="no byte; it is not tried again for"):
            silences.check(SOURCE)
        now[0] += pause
        silences.check(SOURCE)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    silences.clear(SOURCE)
    silences.record(SOURCE, PeerSilentError("no byte"))
    now[0] += FIRST_PAUSE_SECONDS
    silences.check(SOURCE)
    silences.record(SOURCE, PeerSilentError("no byte"))
    silences.forget(SOURCE)
    silences.check(SOURCE)


@given(waits=st.lists(st.tuples(st.floats(0, 30), st.booleans()), min_size=1, max_size=200))
def test_the_time_that_reads_wait_is_bounded_by_the_pauses(waits: list[tuple[float, bool]]) -> None:
    """P8: however many reads come and when, silent reads are as rare as the pauses allow."""
    now, tried_at = [0.0], list[float]()
    silences = Silences(clock=lambda: now[0])
    for seconds, is_silent in waits:
        now[0] += seconds
        try:
            silences.check(SOURCE)
        except PeerSilentError:
            continue
        if is_silent:
            tried_at.append(now[0])
            silences.record(SOURCE, PeerSilentError("no byte"))
        else:
            silences.clear(SOURCE)
    gaps = [later - earlier for earlier, later in pairwise(tried_at)]
    assert all(gap >= FIRST_PAUSE_SECONDS - 1e-6 for gap in gaps)
