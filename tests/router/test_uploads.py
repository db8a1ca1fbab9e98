"""Uploads: the names of files, and the time that a slow client gets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.http.files.files import UploadDeadline, shown_name
from tests.router.batch_cluster import call, filing_cluster

MARKS = "\u202a\u202b\u202d\u202e\u2066\u2067\u2069\u200e\u200f\u061c\u200b\ufeff\u2028\x00\x1b\x7f\x9b\n\r\t"
PARTS = st.sampled_from(["..", ".", "/", "\\", "C:", "x.jsonl", *MARKS])
NAMES = st.text() | st.lists(PARTS | st.text(max_size=3)).map("".join)


@given(NAMES)
def test_a_name_is_one_part_of_a_path_without_invisible_characters(sent: str) -> None:
    name = shown_name(sent)
    assert name not in ("", ".", "..") and len(name) <= 255
    assert not set("/\\" + MARKS) & set(name)
    assert name.encode() and shown_name(name) == name


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("../../x", "x"),
        ("/etc/passwd", "passwd"),
        ("C:\\windows\\x.jsonl", "x.jsonl"),
        ("..\\..\\x", "x"),
        ("requests\u202elnosj.exe", "requestslnosj.exe"),
        ("a\x1b[2Jb.jsonl", "a[2Jb.jsonl"),
        ("..", "file"),
        ("x/", "file"),
        ("", "file"),
        ("donn\u00e9es 1.jsonl", "donn\u00e9es 1.jsonl"),
    ],
)
def test_names(sent: str, shown: str) -> None:
    assert shown_name(sent) == shown


async def test_an_uploads_name_is_returned_without_its_path(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        body = (
            '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            '--b\r\nContent-Disposition: form-data; name="file"; filename="../../x\u202e.jsonl"\r\n\r\n{}\r\n--b--\r\n'
        ).encode()
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with cluster.session.post(cluster.url("/v1/files"), data=body, headers=headers) as response:
            made = await response.json()
        assert (response.status, made["filename"]) == (200, "x.jsonl")
        _, shown = await call(cluster, "GET", f"/v1/files/{made['id']}")
        assert shown["filename"] == "x.jsonl"


async def test_a_client_that_sends_slowly_does_not_get_more_time_with_each_byte(tmp_path: Path) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'

    async def trickle() -> AsyncIterator[bytes]:
        yield head
        while True:
            yield b"x" * 100
            await asyncio.sleep(0.02)

    async with filing_cluster(
        tmp_path, roles=(), body_timeout_seconds=0.3, request_timeout_seconds=5.0
    ) as cluster:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        async with cluster.session.post(
            cluster.url("/v1/files"), data=trickle(), headers=headers
        ) as response:
            assert response.status == 504
            assert (
                "the upload is too slow: it was not complete after 0.3 s and"
                in (await response.json())["error"]["message"]
            )
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


async def test_a_large_upload_gets_the_time_that_its_bytes_take() -> None:
    async with asyncio.timeout(None) as timeout:
        begin = asyncio.get_running_loop().time()
        deadline = UploadDeadline(timeout, 60.0, 600.0)
        ends = []
        for num_bytes in (0, 2**18, 100 * 2**18, 2**40):
            deadline.add(num_bytes)
            ends.append((timeout.when() or 0.0) - begin)
        await asyncio.sleep(0)
    assert ends == pytest.approx([60.0, 61.0, 161.0, 600.0], abs=0.5)
