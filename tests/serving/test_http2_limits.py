"""The frames of a client are counted, whatever they are: valid clients pass, and nothing without end does."""

import sys
from itertools import islice, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from serving.http2_frames import END_HEADERS, END_STREAM, PREFACE, FieldCount, FrameReader, Kind
from serving.http2_limits import (
    BURST,
    FIRST_BURST,
    MAX_BLOCK_BYTES,
    MAX_BLOCK_FRAMES,
    MAX_FIELDS,
    MAX_OPEN_STREAMS,
    RATE,
    ClientFrames,
    FrameLimitError,
)
from tests.clock import Clock
from tests.http2 import ENDLESS, HELLO, endless, frame, literal, new_headers, opened

FEW = 64 * 2**20
"""More bytes than any kind of frame without end may have; padding is the largest."""


def greeted(clock: Clock | None = None) -> ClientFrames:
    frames = ClientFrames(clock or Clock())
    frames.read_sent(HELLO)
    return frames


@pytest.mark.parametrize("name", ENDLESS)
def test_no_kind_of_frame_goes_on_without_end(name: str) -> None:
    frames = greeted()
    num_bytes = 0
    with pytest.raises(FrameLimitError):
        for data in endless(name):
            frames.read_sent(data)
            num_bytes += len(data)
            assert num_bytes < FEW
    assert len(frames.calls) <= MAX_OPEN_STREAMS + 1


def test_a_header_block_may_have_its_size_and_no_byte_more() -> None:
    frames = greeted()
    half = new_headers(MAX_BLOCK_BYTES // 2).ljust(MAX_BLOCK_BYTES // 2, b"\x92")
    frames.read_sent(frame(Kind.HEADERS, 0, 1, half) + frame(Kind.CONTINUATION, 0, 1, half))
    assert frames.is_in_headers
    with pytest.raises(FrameLimitError, match="more than 32768 bytes"):
        frames.read_sent(frame(Kind.CONTINUATION, END_HEADERS, 1, b"x"))


def test_a_header_block_may_have_few_frames() -> None:
    frames = greeted()
    frames.read_sent(opened(1, 0) + frame(Kind.CONTINUATION, 0, 1) * (MAX_BLOCK_FRAMES - 1))
    with pytest.raises(FrameLimitError, match="64 frames"):
        frames.read_sent(frame(Kind.CONTINUATION, END_HEADERS, 1))


@pytest.mark.parametrize(
    "lead", [(END_HEADERS, b""), (0x8 | END_HEADERS, b"\x03"), (0x28 | END_HEADERS, b"\x03" + bytes(5))]
)
def test_a_header_block_may_have_its_fields_and_no_more(lead: tuple[int, bytes]) -> None:
    """One byte makes a field of any size, from a table; padding is none."""
    flags, begin = lead
    padding = b"\x92" * 3 if begin else b""
    frames = greeted()
    frames.read_sent(frame(Kind.HEADERS, flags, 1, begin + b"\x92" * MAX_FIELDS + padding))
    with pytest.raises(FrameLimitError, match="more than 512 fields"):
        frames.read_sent(frame(Kind.HEADERS, flags, 3, begin + b"\x92" * (MAX_FIELDS + 1) + padding))


def test_fields_are_counted_over_the_frames_of_a_block() -> None:
    frames = greeted()
    half = literal(b"a", b"b" * 100) * (MAX_FIELDS // 4) + b"\x92" * (MAX_FIELDS // 4)
    for stream in (1, 3):
        frames.read_sent(
            frame(Kind.HEADERS, 0, stream, half[:70]) + frame(Kind.CONTINUATION, 0, stream, half[70:])
        )
        frames.read_sent(frame(Kind.CONTINUATION, stream // 3 * END_HEADERS, stream, half[:0]))
        if stream == 1:
            frames.read_sent(frame(Kind.CONTINUATION, END_HEADERS, stream, half))
    with pytest.raises(FrameLimitError, match="512 fields"):
        frames.read_sent(
            opened(5, 0) + frame(Kind.CONTINUATION, 0, 5, half) + frame(Kind.CONTINUATION, 0, 5, half)
        )


def _rest(value: int) -> bytes:
    return bytes((value & 0x7F | 0x80,)) + _rest(value >> 7) if value > 0x7F else bytes((value,))


texts = st.binary(max_size=300).map(lambda text: integer(7, len(text)) + text)


def integer(bits: int, value: int) -> bytes:
    """Return a number whose first byte has ``bits`` of it (RFC 7541, 5.1)."""
    largest = (1 << bits) - 1
    return bytes((value,)) if value < largest else bytes((largest,)) + _rest(value - largest)


def marked(mark: int, number: bytes) -> bytes:
    return bytes((number[0] | mark,)) + number[1:]


fields = st.one_of(
    st.integers(1, 5000).map(lambda index: marked(0x80, integer(7, index))),
    st.integers(0, 5000).map(lambda size: marked(0x20, integer(5, size))),
    st.builds(lambda index, text: marked(0x40, integer(6, index)) + text, st.integers(1, 5000), texts),
    st.builds(lambda index, text: integer(4, index) + text, st.integers(1, 5000), texts),
    st.builds(lambda name, text: b"\x40" + name + text, texts, texts),
    st.builds(lambda name, text: b"\x10" + name + text, texts, texts),
)


@given(st.lists(fields, max_size=30), st.lists(st.integers(0, 3000), max_size=10))
def test_every_field_of_a_block_is_counted_once_however_it_is_cut(
    block: list[bytes], cuts: list[int]
) -> None:
    data, count = b"".join(block), FieldCount()
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for begin, end in pairwise(places):
        count.feed(data[begin:end], MAX_FIELDS)
    assert count.num_fields == len(block)


def test_each_header_block_has_its_own_limit() -> None:
    frames = greeted()
    for stream in range(1, 200, 2):
        frames.read_sent(
            opened(stream, 0) + frame(Kind.CONTINUATION, END_HEADERS, stream, new_headers(2**14))
        )
        frames.answered.feed(frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream))
    assert not frames.is_in_headers
    assert not len(frames.calls)
    assert frames.num_blocks == 101


@pytest.mark.parametrize(
    "data",
    [
        frame(Kind.CONTINUATION, END_HEADERS, 1),
        opened(1, 0) + frame(Kind.DATA, 0, 1, bytes(1000)),
        opened(1, 0) + frame(Kind.PING, 0, 0, bytes(8)),
        opened(1, 0) + frame(Kind.CONTINUATION, 0, 3),
        opened(1, 0) + opened(3),
        opened(0),
        frame(Kind.HEADERS, 0, 1, bytes(2**14 + 1)),
        frame(Kind.SETTINGS, 0, 0, bytes(2**14 + 1)),
        frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4)),
    ],
)
def test_what_no_client_sends_ends_the_connection(data: bytes) -> None:
    with pytest.raises(FrameLimitError):
        greeted().read_sent(data)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", PREFACE + opened(1), b"\x16\x03\x01", PREFACE[:-1] + b"x"]
)
def test_another_protocol_ends_the_connection(data: bytes) -> None:
    with pytest.raises(FrameLimitError):
        ClientFrames(Clock()).read_sent(data)


def test_frames_that_answer_the_server_are_free() -> None:
    """A client acknowledges what it reads, with a ping or a window update for each message."""
    frames = greeted()
    frames.read_sent(opened(1))
    for _ in range(3 * BURST):
        frames.answered.feed(frame(Kind.DATA, 0, 1, b"token"))
        frames.read_sent(frame(Kind.WINDOW_UPDATE, 0, 0, (14).to_bytes(4)))
    assert len(frames.calls) == 1


def test_a_new_client_may_send_what_it_needs_for_all_its_calls_at_once_and_no_more() -> None:
    """128 calls, which a port allows at a time, each with a message, a larger window and an end."""
    frames = greeted()
    for number in range(127):
        stream = 2 * number + 1
        message = frame(Kind.DATA, END_STREAM, stream, bytes(5))
        window = frame(Kind.WINDOW_UPDATE, 0, stream, (14).to_bytes(4))
        frames.read_sent(opened(stream) + message + window + frame(Kind.RST_STREAM, 0, stream, bytes(4)))
    assert (frames.calls.num_begun, len(frames.calls)) == (127, 0)
    with pytest.raises(FrameLimitError, match="no message"):
        frames.read_sent(frame(Kind.PING, 0, 0, bytes(8)) * 4)


def test_a_client_that_reads_many_messages_may_send_more_at_once() -> None:
    frames = greeted()
    frames.read_sent(opened(1))
    for _ in range(BURST):
        frames.answered.feed(frame(Kind.DATA, 0, 1, b"token"))
    frames.read_sent(frame(Kind.WINDOW_UPDATE, 0, 0, (14).to_bytes(4)) * BURST)
    with pytest.raises(FrameLimitError, match="no message"):
        frames.read_sent(frame(Kind.PING, 0, 0, bytes(8)))


@pytest.mark.parametrize(
    ("answer", "has_accepted"),
    [
        (frame(Kind.SETTINGS, 0, 0), False),
        (frame(Kind.PING, 1, 0, bytes(8)), False),
        (frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1), False),
        (frame(Kind.RST_STREAM, 0, 1, bytes(4)), False),
        (frame(Kind.HEADERS, END_HEADERS, 1), True),
        (frame(Kind.DATA, 0, 1, b"token"), True),
    ],
)
def test_only_a_call_that_the_server_accepts_makes_a_connection_useful(
    answer: bytes, has_accepted: bool
) -> None:
    frames = greeted()
    frames.read_sent(opened(1))
    frames.answered.feed(answer)
    assert frames.calls.has_accepted is has_accepted


def test_acknowledgements_of_the_server_are_not_messages() -> None:
    frames = greeted()
    with pytest.raises(FrameLimitError):
        for _ in range(3 * BURST):
            frames.read_sent(frame(Kind.PING, 0, 0, bytes(8)))
            frames.answered.feed(frame(Kind.PING, 1, 0, bytes(8)))


def test_a_steady_rate_is_allowed() -> None:
    clock = Clock()
    frames = greeted(clock)
    for _ in range(3 * BURST):
        clock.now += 1.01 / RATE
        frames.read_sent(frame(Kind.WINDOW_UPDATE, 0, 0, (14).to_bytes(4)))


def test_a_large_message_is_free() -> None:
    frames = greeted()
    frames.read_sent(opened(1))
    for _ in range(3 * BURST):
        frames.read_sent(frame(Kind.DATA, 0, 1, bytes(1000)))


def test_calls_that_end_leave_nothing() -> None:
    frames = greeted()
    ends = [
        lambda stream: frames.answered.feed(frame(Kind.RST_STREAM, 0, stream, bytes(4))),
        lambda stream: frames.read_sent(frame(Kind.RST_STREAM, 0, stream, bytes(4))),
        lambda stream: frames.answered.feed(frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream)),
    ]
    for number in range(FIRST_BURST // 2):
        stream = 2 * number + 1
        frames.read_sent(opened(stream))
        assert len(frames.calls) == 1
        ends[number % 3](stream)
        assert not len(frames.calls)


def _size_of(kept: object) -> int:
    """Return the bytes of an object and of what it owns."""
    fields = vars(kept).values() if hasattr(kept, "__dict__") and not callable(kept) else ()
    return sys.getsizeof(kept) + sum(map(_size_of, fields))


heads = st.builds(
    frame,
    st.one_of(st.sampled_from(list(Kind)), st.integers(0, 255)),
    st.integers(0, 255),
    st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)),
    st.one_of(st.binary(max_size=40), st.integers(0, 2**15).map(bytes)),
)
streams = st.lists(st.one_of(heads, heads, st.binary(max_size=20)), max_size=30).map(b"".join)


def judged(pieces: list[bytes]) -> tuple[str, int, int]:
    """Return the verdict on a client's bytes, and what is counted then."""
    frames, verdict = ClientFrames(Clock()), ""
    try:
        for piece in pieces:
            frames.read_sent(piece)
    except FrameLimitError as error:
        verdict = error.reason
    return verdict, len(frames.calls), frames.num_blocks


@given(streams, st.booleans(), st.lists(st.integers(0, 2000), max_size=20))
@example(opened(1) + frame(Kind.PING, 0, 0, bytes(8)), True, [1, 2, 3, 4, 5, 6, 7, 8, 9, 30])
def test_the_verdict_does_not_depend_on_how_the_bytes_are_cut(
    data: bytes, is_greeted: bool, cuts: list[int]
) -> None:
    data = HELLO + data if is_greeted else data
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[begin:end] for begin, end in pairwise(places)]
    assert judged(pieces) == judged([data])


@given(st.lists(st.one_of(heads, st.binary(max_size=20)), max_size=60))
def test_whatever_comes_the_counters_stay_small(chunks: list[bytes]) -> None:
    frames = greeted()
    try:
        for chunk in chunks:
            frames.read_sent(chunk)
            frames.answered.feed(chunk)
            assert _size_of(frames) < 2**17
            assert len(frames.calls) <= MAX_OPEN_STREAMS
    except FrameLimitError:
        pass


def test_a_reader_finds_the_frames_of_any_pieces() -> None:
    found: list[tuple[int, ...]] = []

    def note(*head: int) -> bool:
        found.append(head)
        return False

    reader = FrameReader(note)
    data = opened(1) + frame(Kind.DATA, END_STREAM, 1, bytes(700)) + frame(0xFE, 7, 2**31 + 5)
    for size in (1, 2, 7, 9, 10, 400):
        found.clear()
        parts = iter(data)
        while piece := bytes(islice(parts, size)):
            reader.feed(piece)
        assert [head[0] for head in found] == [Kind.HEADERS, Kind.DATA, 0xFE]
        assert found[1:] == [(Kind.DATA, END_STREAM, 1, 700), (0xFE, 7, 5, 0)]
        assert reader.is_between_frames
