"""Bodies that cost more than their bytes: compressed ones, and ones with very many values or lists."""

import asyncio
import gzip
import io
import json
import tracemalloc
import zlib
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from contract.errors import OverloadedError, PayloadTooLargeError
from contract.identity import Role
from router.http.bodies.decoding import LARGE_BYTES, MAX_LISTS, decode
from router.http.bodies.json_bodies import BodyReader, ZstdInflater, zstd
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END

TEXT = "/v1/completions"
HELLO = Script(tokens=[END])


def bomb(num_bytes: int, encoding: str) -> bytes:
    """Return a small body that inflates to ``num_bytes``."""
    packer: Any = zstd.ZstdCompressor() if encoding == "zstd" else zlib.compressobj(wbits=31)
    pieces = [packer.compress(b'{"prompt": "')]
    pieces += [packer.compress(b"a" * 2**20) for _ in range(num_bytes // 2**20)]
    return b"".join([*pieces, packer.compress(b'"}'), packer.flush()])


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_inflating_ends_at_the_limit(encoding: str) -> None:
    """L6: a body of 260 kB (zstd: 8 kB) that inflates to 256 MiB is rejected after max_body_bytes of it."""
    packed = bomb(2**28, encoding)
    async with running_cluster(HELLO, (Role.AGGREGATED,), max_body_bytes=2**20) as cluster:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        tracemalloc.start()
        try:
            async with cluster.session.post(cluster.url(TEXT), data=packed, headers=headers) as response:
                assert response.status == 413
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    "encoding", ["gzip", "deflate", "raw deflate", "two members", "GZIP", "zstd", "two frames"]
)
async def test_compressed_bodies_are_read(encoding: str) -> None:
    """L6: all supported encodings."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    raw = zlib.compressobj(wbits=-15)
    sent = {
        "gzip": gzip.compress(body),
        "GZIP": gzip.compress(body),
        "deflate": zlib.compress(body),
        "raw deflate": raw.compress(body) + raw.flush(),
        "two members": gzip.compress(body[:9]) + gzip.compress(body[9:]),
        "zstd": zstd.compress(body),
        "two frames": zstd.compress(body[:9]) + zstd.compress(b"") * 9 + zstd.compress(body[9:]),
    }[encoding]
    names = {"raw deflate": "deflate", "two members": "gzip", "two frames": "zstd"}
    name = names.get(encoding, encoding)
    headers = {"Content-Type": "application/json", "Content-Encoding": name}
    async with (
        running_cluster(HELLO, (Role.AGGREGATED,)) as cluster,
        cluster.session.post(cluster.url(TEXT), data=sent, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("encoding", ["br", "zstd, gzip", "gzip, gzip", "x", "compress"])
async def test_an_encoding_that_is_not_served_is_415(encoding: str) -> None:
    """L6: an unknown encoding is not ignored."""
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with (
        running_cluster(HELLO, (Role.AGGREGATED,)) as cluster,
        cluster.session.post(cluster.url(TEXT), data=b'{"prompt": "a"}', headers=headers) as response,
    ):
        assert response.status == 415
        assert "Content-Encoding" in (await response.json())["error"]["message"]


_LARGE_WINDOW: dict[int, int] = {
    zstd.CompressionParameter.window_log: 27,
    zstd.CompressionParameter.content_size_flag: 0,
}


def with_large_window(content: bytes) -> bytes:
    """Return a frame that takes 128 MiB to inflate."""
    packer = zstd.ZstdCompressor(options=_LARGE_WINDOW)
    return packer.compress(content) + packer.flush()


BROKEN: dict[str, tuple[str, bytes]] = {
    "cut gzip": ("gzip", gzip.compress(b'{"prompt": "a"}')[:-4]),
    "cut zstd": ("zstd", zstd.compress(b'{"prompt": "a"}')[:-4]),
    "no zstd": ("zstd", b'{"prompt": "a"}'),
    "a window of 128 MiB": ("zstd", with_large_window(b'{"prompt": "a"}')),
    "rest behind a frame": ("zstd", zstd.compress(b'{"prompt": "a"}') + b"more"),
}


async def test_a_compressed_body_that_is_cut_or_broken_is_400() -> None:
    """L6: the error names the early end, or the encoding."""
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        for name, (encoding, sent) in BROKEN.items():
            headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
            async with cluster.session.post(cluster.url(TEXT), data=sent, headers=headers) as response:
                assert response.status == 400, name
                assert "the body" in (await response.json())["error"]["message"]


@given(st.binary(max_size=300), st.lists(st.integers(1, 40), min_size=1, max_size=20), st.booleans())
def test_any_cut_of_a_zstd_body_inflates_to_it(content: bytes, sizes: list[int], is_split: bool) -> None:
    half = len(content) // 2 if is_split else len(content)
    packed = zstd.compress(content[:half]) + zstd.compress(content[half:])
    inflater = ZstdInflater()
    found, begin = b"", 0
    for size in [*sizes, len(packed)]:
        found += b"".join(inflater.push(packed[begin : begin + size]))
        begin += size
    assert found == content and inflater.is_finished


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b"[1]," * 10**6 + b"[1]]}",
        b'{"prompt": "a", "allowed_token_ids": [' + b"1," * 10**6 + b"1]}",
        b'{"prompt": "a", "logit_bias": {' + b'"1":1,' * 10**6 + b'"1":1}}',
        b'{"prompt": "a", "x": ' + b"[" * 10**6 + b"]" * 10**6 + b"}",
        b'{"prompt": "a", "x": [' + b'"",' * 10**6 + b'""]}',
        b'{"prompt": "a", "x": [' + b'"\\"",' * 10**6 + b'""]}',
        b"{" * 2**20,
    ],
    ids=["lists", "numbers", "keys", "depth", "strings", "escapes", "no JSON"],
)
async def test_very_many_values_are_refused_before_they_are_decoded(body: bytes) -> None:
    """M2: a body of tiny values is 413 by its count alone."""
    async with (
        running_cluster(HELLO, (Role.AGGREGATED,)) as cluster,
        cluster.session.post(
            cluster.url(TEXT), data=io.BytesIO(body), headers={"Content-Type": "application/json"}
        ) as response,
    ):
        assert response.status == 413
        assert "values" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("mark", [",", "[", "{", '\\"', "\\\\", '\\",[', "\\u005b,", "{\\\\"])
async def test_a_text_may_hold_any_number_of_marks(mark: str) -> None:
    """M2: commas and brackets within a string are text."""
    body = b'{"prompt": "' + mark.encode() * 300_000 + b'"}'
    assert await decode(body, 1024) == json.loads(body)


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='ab,[]{}:"\\', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('a,[{"\\', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(1, 20))
async def test_the_count_is_right_for_any_json(value: Any, max_values: int) -> None:
    """M2: a body within the limit is decoded and one beyond it is rejected, independent of the content of its strings."""
    raw = json.dumps(value).encode()
    if _num_values(value) <= max_values:
        assert await decode(raw, max_values) == value
    else:
        with pytest.raises(PayloadTooLargeError):
            await decode(raw, max_values)


def _num_values(value: Any) -> int:
    """Return the number of lists and objects and of the commas in them."""
    children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if children is None:
        return 0
    return 1 + max(0, len(children) - 1) + sum(map(_num_values, children))


@given(st.lists(st.sampled_from(['"', "\\", ",", "[", "x", "\\\\", '\\"']), max_size=200_000 // 1000))
async def test_pieces_are_cut_anywhere(marks: list[str]) -> None:
    """M2: a string that is split over two counted pieces is still one string."""
    text = "".join(marks)
    for length in (2**16 - 3, 2**16 - 2, 2**16 - 1):
        value = ["a" * (length - 2) + text, "[,", 1]
        raw = msgspec.json.encode(value)
        assert await decode(raw + b" " * (2**16 - len(raw) % 2**16), 4) == value


async def test_lists_have_a_limit_of_their_own() -> None:
    """M2: a million lists cost more than a million numbers."""
    assert len(await decode(b"[" + b"1," * MAX_LISTS + b"1]", 2**20)) == MAX_LISTS + 1
    with pytest.raises(PayloadTooLargeError):
        await decode(b"[" + b"[]," * MAX_LISTS + b"[]]", 2**20)


async def test_all_bodies_together_are_bounded() -> None:
    """M2: the bytes of all bodies in memory have a limit, and each body releases its bytes."""
    async with running_cluster(HELLO, (Role.AGGREGATED,), max_bodies_bytes=2000) as cluster:
        assert (await cluster.post(TEXT, {"prompt": "hello", "user": "x" * 1500}))[0] == 200
        status, answer = await cluster.post(TEXT, {"prompt": "hello", "user": "x" * 2500})
        assert (status, "2000 bytes" in answer["error"]["message"]) == (429, True)
        assert (await cluster.post(TEXT, {"prompt": "hello", "user": "x" * 1500}))[0] == 200


def test_an_abandoned_body_releases_its_bytes() -> None:
    """M2: the count includes only the bodies that are being read."""
    reader = BodyReader(10, 25)
    with reader.reading() as body:
        reader.count(10)
        body.num_bytes = 10
        with pytest.raises(OverloadedError, match="25 bytes"):
            reader.count(16)
        assert reader.num_bytes == 10
    assert reader.num_bytes == 0


def test_a_small_body_is_accepted_while_large_ones_hold_everything() -> None:
    """M2: eight bodies of 8 MiB that arrived slowly blocked the requests of all clients."""
    reader = BodyReader(2**23, 2**26)
    reader.count(2**26)
    reader.count(2**13)
    reader.count(2**13, 2**13)
    with pytest.raises(OverloadedError):
        reader.count(1, 2**14)


async def test_one_large_body_is_decoded_at_a_time() -> None:
    """M2: six bodies of 8 MiB kept the event loop busy half of the time; small ones do not wait for them."""
    reader, events = BodyReader(2**23, 2**26), list[str]()

    async def decode(raw: bytes) -> None:
        name = raw[:1].decode()
        events.append(f"{name} begins")
        await asyncio.sleep(0.01)
        events.append(f"{name} ends")

    bodies = [b"a" * (LARGE_BYTES + 1), b"b" * (LARGE_BYTES + 1), b"c" * 100]
    await asyncio.gather(*(reader.decoded(raw, decode) for raw in bodies))
    large = [event for event in events if event[0] != "c"]
    assert large == ["a begins", "a ends", "b begins", "b ends"]
    assert events.index("c begins") < events.index("a ends")


async def test_a_large_body_leaves_most_of_the_loops_time_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """M2: each piece of work is followed by a pause three times as long."""
    now, rests = 0.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now
        rests.append(seconds)
        now += seconds

    def work(text: bytes, start: int = 0, end: int | None = None) -> tuple[int, int]:
        nonlocal now
        now += 0.002
        return 0, 0

    monkeypatch.setattr("router.intake.limits.time.monotonic", lambda: now)
    monkeypatch.setattr("router.intake.limits.asyncio.sleep", sleep)
    monkeypatch.setattr("router.http.bodies.decoding._at_most", work)
    await decode(b'"' + b"a" * (LARGE_BYTES * 3) + b'"', 100)
    assert rests == [pytest.approx(0.006)] * 3 + [0.0]
