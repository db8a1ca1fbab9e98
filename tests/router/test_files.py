"""/v1/files: upload, list, retrieve, content, delete; rejected uploads, and the content of the folder."""

import asyncio
import re
import stat
import threading
import warnings
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request

from contract.errors import SettingError
from router.http.access import TENANT
from router.http.files.files import FileEndpoints
from router.service import RouterService
from router.settings import RouterSettings
from tests.router.batch_cluster import call, content_of, create, filing_cluster, form, key, prompts, upload
from tests.router.cluster import SECRET, Cluster, running_cluster
from tests.router.test_batch_runs import LIMITS, Bench, FullDisk

HOSTILE_NAMES = ("../../etc/passwd", "/etc/passwd", "..", "a\\b\u202e.jsonl", "x" * 5000)


async def ids(cluster: Cluster, query: str = "", **options: Any) -> list[str]:
    status, listed = await call(cluster, "GET", f"/v1/files{query}", **options)
    assert (status, listed["object"]) == (200, "list")
    return [file["id"] for file in listed["data"]]


async def test_a_file_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    content = bytes(range(256)) * 3000
    async with filing_cluster(tmp_path / "files", roles=()) as cluster:
        status, file = await call(cluster, "POST", "/v1/files", data=form(content, name="in put.jsonl"))
        assert status == 200
        assert file["id"].startswith("file-") and len(file["id"]) == 37
        assert (file["object"], file["bytes"], file["filename"]) == ("file", len(content), "in put.jsonl")
        assert (file["purpose"], file["status"]) == ("batch", "processed")
        assert file["expires_at"] - file["created_at"] == 30 * 24 * 3600
        assert await call(cluster, "GET", f"/v1/files/{file['id']}") == (200, file)
        assert await content_of(cluster, file["id"]) == content
        deleted = await call(cluster, "DELETE", f"/v1/files/{file['id']}")
        assert deleted == (200, {"id": file["id"], "object": "file", "deleted": True})
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            status, answer = await call(cluster, method, f"/v1/files/{file['id']}{path}")
            assert (status, answer["error"]["param"]) == (404, "id")
            assert answer["error"]["message"] == f"No such File object: {file['id']}"


async def test_the_folder_is_this_users_alone_and_no_name_of_a_client_is_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    async with filing_cluster(folder, roles=()) as cluster:
        for name in HOSTILE_NAMES:
            status, file = await call(cluster, "POST", "/v1/files", data=form(b"x", name=name))
            assert status == 200, file
            assert len(file["filename"]) <= 255
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        found = list(folder.iterdir())
        assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
        assert len(found) == 2 * len(HOSTILE_NAMES) + 1
        names = {path.name.removesuffix(".json").removesuffix(".data") for path in found}
        assert names == {"lock", *await ids(cluster)}
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


async def test_a_name_that_is_not_utf8_is_shown_without_those_bytes(tmp_path: Path) -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    body = (
        part % (b"purpose", b"", b"batch")
        + part % (b"file", b'; filename="a\xff\xfe.jsonl"', b"x")
        + b"--b--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with filing_cluster(tmp_path, roles=()) as cluster:
        status, file = await call(cluster, "POST", "/v1/files", headers, data=body)
        assert (status, file["filename"]) == (200, "a??.jsonl")
        hostile = part % (b"\xff", b"", b"batch") + b"--b--\r\n"
        status, answer = await call(cluster, "POST", "/v1/files", headers, data=hostile)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        for path in ("/v1/files/%ff", "/v1/files/%00", "/v1/files/..%2flock", "/v1/batches/%ed%a0%80"):
            status, _ = await call(cluster, "GET", path)
            assert status == 404, path
        status, answer = await call(cluster, "GET", "/v1/files?after=%ff&limit=%d9%a1")
        assert status == 400


async def test_files_are_listed_in_pages(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        made = [await upload(cluster, b"x") for _ in range(5)]
        newest = made[::-1]
        assert await ids(cluster) == newest
        assert await ids(cluster, "?order=asc") == made
        assert await ids(cluster, f"?limit=2&after={newest[1]}") == newest[2:4]
        _, page = await call(cluster, "GET", f"/v1/files?limit=2&after={newest[1]}")
        assert (page["first_id"], page["last_id"], page["has_more"]) == (newest[2], newest[3], True)
        _, last = await call(cluster, "GET", f"/v1/files?limit=2&after={newest[3]}")
        assert (last["data"][0]["id"], last["has_more"]) == (newest[4], False)
        assert await ids(cluster, "?purpose=batch") == newest
        assert await ids(cluster, "?purpose=batch_output") == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=10001", "limit")):
            status, answer = await call(cluster, "GET", f"/v1/files?{query}")
            assert (status, answer["error"]["param"]) == (400, param)
        for query, param in (("order=up", "order"), ("after=file-none", "after")):
            status, answer = await call(cluster, "GET", f"/v1/files?{query}")
            assert (status, answer["error"]["param"]) == (400, param)


async def test_expires_after_is_honoured(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=(), files_retention_seconds=7200) as cluster:
        anchor = {"expires_after[anchor]": "created_at"}
        for seconds, kept in (("3600", 3600), ("7200", 7200), ("2592000", 7200)):
            fields = {**anchor, "expires_after[seconds]": seconds}
            _, file = await call(cluster, "POST", "/v1/files", data=form(b"x", **fields))
            assert file["expires_at"] - file["created_at"] == kept
        for fields, param in (
            ({**anchor, "expires_after[seconds]": "3599"}, "expires_after.seconds"),
            ({**anchor, "expires_after[seconds]": "1e4"}, "expires_after.seconds"),
            (anchor, "expires_after.seconds"),
            ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ):
            status, answer = await call(cluster, "POST", "/v1/files", data=form(b"x", **fields))
            assert (status, answer["error"]["param"]) == (400, param)


async def test_an_invalid_upload_is_rejected_and_leaves_nothing(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=(), files_max_bytes=1000) as cluster:
        url = cluster.url("/v1/files")
        two = form(b"x")
        two.add_field("file", b"y", filename="y")
        only_purpose = aiohttp.FormData({"purpose": "batch"}, default_to_multipart=True)
        for data, expected, param in (
            (form(b"x", purpose=None), 400, "purpose"),
            (form(b"x", purpose="assistants"), 400, "purpose"),
            (form(b"x", purpose="batch_output"), 400, "purpose"),
            (form(b"x", color="red"), 400, "color"),
            (form(b"x" * 1001), 413, "file"),
            (two, 400, "file"),
            (only_purpose, 400, "file"),
            (form(b"x", **{"expires_after[anchor]": "x" * 2000}), 400, "expires_after[anchor]"),
        ):
            async with cluster.session.post(url, data=data) as response:
                told = (await response.json())["error"]
                assert (response.status, told["param"]) == (expected, param), told
        async with cluster.session.post(url, json={"file": "x"}) as response:
            assert response.status == 415
        for body in (b"", b"no boundary at all", b"--b\r\n", b"--b\r\nX\r\n\r\n", b"--b\r\n\r\nx"):
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            async with cluster.session.post(url, data=body, headers=headers) as response:
                assert response.status == 400, body
        async with cluster.session.post(
            url, data=b"x", headers={"Content-Type": "multipart/form-data"}
        ) as one:
            assert one.status == 400
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        status, _ = await call(cluster, "POST", "/v1/files", data=form(b"x" * 1000))
        assert status == 200


class SlowDisk(FullDisk):
    """A disk that creates a file once ``may_create`` is set; ``is_asked`` is set by then."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked = threading.Event()
        self.may_create = threading.Event()

    def create(self, path: Path) -> int:
        self.is_asked.set()
        assert self.may_create.wait(10)
        return super().create(path)


async def test_an_upload_that_is_cancelled_while_its_file_is_created_leaves_nothing(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with Bench(tmp_path, disk=disk).service() as service:
        endpoints = FileEndpoints(
            service.storage, service.runner, timeout_seconds=60.0, body_seconds=60.0, stall_seconds=60.0
        )
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        request = make_mocked_request("POST", "/v1/files", headers)
        request[TENANT] = ""
        uploading = asyncio.create_task(endpoints.upload(request))
        await asyncio.to_thread(disk.is_asked.wait, 10)
        uploading.cancel()
        disk.may_create.set()
        await asyncio.wait([uploading])
        assert uploading.cancelled()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        service.storage.store.quota.check_records("", LIMITS.count)


async def test_purpose_may_come_behind_the_file(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        data = form(b"x", purpose=None)
        data.add_field("purpose", "batch")
        status, _ = await call(cluster, "POST", "/v1/files", data=data)
        assert status == 200


async def test_the_folder_is_bounded_in_bytes_and_files_and_a_key_has_a_share(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"files_total_bytes": 1000, "files_max_count": 6, "files_key_share": 0.5}
    async with filing_cluster(tmp_path, roles=(), api_keys="a,b", **bounds) as cluster:
        one = await upload(cluster, b"x" * 400, key("a"))
        status, answer = await call(cluster, "POST", "/v1/files", key("a"), data=form(b"x" * 101))
        assert (status, answer["error"]["code"]) == (413, "storage_full")
        assert "files_total_bytes" in answer["error"]["message"]
        await upload(cluster, b"x" * 100, key("a"))
        await upload(cluster, b"x" * 450, key("b"))
        status, _ = await call(cluster, "DELETE", f"/v1/files/{one}", key("a"))
        assert status == 200
        for _ in range(2):
            await upload(cluster, b"x", key("a"))
        status, answer = await call(cluster, "POST", "/v1/files", key("a"), data=form(b"x"))
        assert (status, answer["error"]["code"]) == (413, "storage_full")
        assert "files_max_count" in answer["error"]["message"]


async def test_a_key_does_not_see_the_files_of_another(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=(), api_keys="a,b") as cluster:
        mine = await upload(cluster, b"secret", key("a"))
        assert await ids(cluster, headers=key("a")) == [mine]
        assert await ids(cluster, headers=key("b")) == []
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            status, answer = await call(cluster, method, f"/v1/files/{mine}{path}", key("b"))
            assert (status, answer["error"]["message"]) == (404, f"No such File object: {mine}")
        status, answer = await call(cluster, "GET", f"/v1/files?after={mine}", key("b"))
        assert (status, answer["error"]["param"]) == (400, "after")
        body = {"input_file_id": mine, "endpoint": "/v1/completions", "completion_window": "24h"}
        status, answer = await call(cluster, "POST", "/v1/batches", key("b"), json=body)
        assert (status, answer["error"]["param"]) == (404, "input_file_id")
        status, _ = await call(cluster, "GET", f"/v1/files/{mine}")
        assert status == 401
        assert await content_of(cluster, mine, key("a")) == b"secret"


async def test_without_a_folder_every_path_names_the_setting(tmp_path: Path) -> None:
    async with running_cluster(lambda _: pytest.fail("nothing is asked"), ()) as cluster:
        for method, path in (
            *(("POST", "/v1/files"), ("GET", "/v1/files"), ("GET", "/v1/files/file-1")),
            *(("DELETE", "/v1/files/file-1"), ("GET", "/v1/files/file-1/content")),
            *(("POST", "/v1/batches"), ("GET", "/v1/batches"), ("GET", "/v1/batches/batch_1")),
            ("POST", "/v1/batches/batch_1/cancel"),
        ):
            status, answer = await call(cluster, method, path)
            assert (status, answer["error"]["code"]) == (404, "files_not_enabled")
            assert "--files-dir" in answer["error"]["message"]


async def test_files_survive_a_restart_and_an_expired_one_does_not(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        kept, gone = await upload(cluster, b"kept"), await upload(cluster, b"gone")
    record = tmp_path / f"{gone}.json"
    record.write_text(re.sub(r'"expires_at":\d+', '"expires_at":1', record.read_text()))
    (tmp_path / f"file-{'a' * 32}.data").write_bytes(b"an upload that was not whole")
    (tmp_path / f"file-{'a' * 32}.json.tmp").write_bytes(b"{")
    async with filing_cluster(tmp_path, roles=()) as cluster:
        assert await ids(cluster) == [kept]
        assert await content_of(cluster, kept) == b"kept"
    assert {path.name for path in tmp_path.iterdir()} == {"lock", f"{kept}.json", f"{kept}.data"}


def service_at(folder: Path) -> RouterService:
    addresses = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    return RouterService(RouterSettings(secret=SECRET, files_dir=folder, **addresses))  # type: ignore[arg-type]


async def test_a_second_router_on_the_folder_is_refused(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        second = service_at(tmp_path)
        with pytest.raises(SettingError, match=r"files_dir .* is used by another router"):
            await second.start()
        await second.stop()
        await upload(cluster, b"x")
    async with filing_cluster(tmp_path, roles=()) as cluster:
        assert len(await ids(cluster)) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("file-1.json", b"{"),
        ("batch_1.json", b'{"id":"batch_1"}'),
        ("file-1.json", b'{"id":"file-1","version":2}'),
    ],
)
async def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    tmp_path.chmod(0o700)
    service = service_at(tmp_path)
    with pytest.raises(SettingError, match=rf"files_dir .* holds {name}"):
        await service.start()
    await service.stop()
    assert (tmp_path / name).read_bytes() == content


async def test_a_copy_of_a_record_is_named(tmp_path: Path) -> None:
    """The data belongs to the file name of a record, not to the id inside it."""
    async with filing_cluster(tmp_path, roles=()) as cluster:
        file_id = await upload(cluster, b"x")
    record = tmp_path / f"{file_id}.json"
    (tmp_path / "file-copy.json").write_bytes(record.read_bytes())
    service = service_at(tmp_path)
    with pytest.raises(
        SettingError, match=rf"holds file-copy.json, which is a copy of the record of '{file_id}'"
    ):
        await service.start()
    await service.stop()


async def test_files_that_are_not_the_services_own_stay(tmp_path: Path) -> None:
    """In a folder with other content, files that ended in .data or .tmp were removed at the start."""
    foreign = ["model.data", "download.tmp", "file-1.data", "file-list.json.tmp", f"file-{'0' * 32}.data.bak"]
    strays = [f"file-{'0' * 32}.data", f"batch_{'1' * 32}.json.tmp"]
    for name in foreign + strays:
        (tmp_path / name).write_bytes(b"x")
    async with filing_cluster(tmp_path, roles=()):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*foreign, "lock"])


@pytest.mark.parametrize(
    "name", ["filename*=foo''%e2", "filename*=utf-8''%ff", 'filename="a"; ;=', "filename*=x"]
)
async def test_an_unreadable_name_causes_no_warning_with_its_text(tmp_path: Path, name: str) -> None:
    """L1: Python keeps the text of every warning, and writes it to standard error unchanged."""
    body = (
        f'--b\r\nContent-Disposition: form-data; name="file"; {name}\r\n\r\n{{}}\r\n'
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with filing_cluster(tmp_path, roles=()) as cluster:
        with warnings.catch_warnings(record=True) as caught:
            status, _ = await call(cluster, "POST", "/v1/files", headers, data=body.encode())
        assert status in (200, 400)
        assert not caught


async def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    service = service_at(folder)
    with pytest.raises(SettingError, match=r"can be written to by other users \(mode 777\)"):
        await service.start()
    await service.stop()
    service = service_at(tmp_path / "open" / "file" / "x")
    (tmp_path / "open" / "file").write_bytes(b"")
    with pytest.raises(SettingError, match=r"files_dir .* cannot be used"):
        await service.start()
    await service.stop()


async def test_the_input_of_an_open_batch_is_not_deleted(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:  # without a worker a batch stays open
        batch = await create(cluster, prompts(1))
        status, answer = await call(cluster, "DELETE", f"/v1/files/{batch['input_file_id']}")
        assert status == 400
        assert "cancel the batch first" in answer["error"]["message"]
