"""The HTTP API below a path, and at the path of a Unix socket, as reverse proxies use them."""

import asyncio
import json
import socket
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from contract.addresses import is_loopback, unix_path
from contract.errors import SettingError
from contract.identity import Role
from router.service import RouterService
from router.settings import RouterSettings
from serving.http_hosts import HostCheck
from serving.settings import HttpAddress
from tests.fakes.router.script import Script
from tests.router.cluster import SECRET, running_cluster
from tests.router.tool_cluster import CHAT
from tests.text.tiny_model import byte_ids

SCRIPT = Script(tokens=byte_ids(b"ok"))
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ROLES = (Role.AGGREGATED,)


async def test_the_api_is_served_below_the_root_path_and_without_it() -> None:
    """C10: a proxy that passes the path on unchanged had to be taught to rewrite it."""
    async with running_cluster(SCRIPT, ROLES, root_path="/llm/v2", api_keys="key") as cluster:
        headers = {"Authorization": "Bearer key"}
        for prefix in ("", "/llm/v2"):
            status, answer = await cluster.post(f"{prefix}{CHAT}", SAY, headers=headers)
            assert status == 200 and answer["choices"][0]["message"]["content"] == "ok"
            for path, wanted in (("/health", 200), ("/v1/models", 401), ("/health?x=/llm/v2", 200)):
                assert (await cluster.get(f"{prefix}{path}"))[0] == wanted
        async with cluster.session.get(cluster.url("/llm/v2"), headers={"Accept": "text/html"}) as home:
            assert home.status == 200 and "kvbaton" in await home.text()
        for path in ("/llm/v22/health", "/llm/health", "/llm/v2/llm/v2/health", "/llm/v2health"):
            async with cluster.session.get(cluster.url(path), headers=headers) as response:
                assert response.status == 404, path
        assert (await cluster.get("/llm/v2//health"))[0] == 200, "one slash too much"


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "//a", "/a//b", "/a?b"])
def test_a_wrong_root_path_is_refused_at_the_start(path: str) -> None:
    with pytest.raises(ValidationError, match="is no path such as /llm"):
        RouterSettings(secret=SECRET, root_path=path)


async def over(path: Path, method: str, url: str, **options: Any) -> tuple[int, Any]:
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://localhost{url}", **options) as response,
    ):
        return response.status, json.loads(await response.text())


async def test_the_api_is_served_at_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # by a process that was killed
    left.close()
    async with running_cluster(SCRIPT, ROLES, http=f"unix:{path}") as cluster:
        assert cluster.service.addresses.http == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        status, answer = await over(path, "POST", CHAT, json=SAY)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "ok"
        both = await asyncio.gather(
            *(over(path, "GET", "/health", headers={"Host": "public.example"}) for _ in range(9))
        )
        assert {status for status, _ in both} == {200}
        other = RouterService(RouterSettings(secret=SECRET, http=f"unix:{path}", grpc="127.0.0.1:0"))
        with pytest.raises(SettingError, match="another process listens there"):
            await other.start()
        await other.stop()
        assert (await over(path, "GET", "/health"))[0] == 200
    assert not path.exists()


async def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    router = RouterService(RouterSettings(secret=SECRET, http=f"unix:{path}", grpc="127.0.0.1:0"))
    with pytest.raises(SettingError, match="http is unix:"):
        await router.start()
    await router.stop()
    assert path.read_text() == "mine"


ADDRESS: TypeAdapter[str] = TypeAdapter(HttpAddress)


@given(st.text(max_size=120))
@settings(max_examples=200, deadline=None)
def test_every_address_is_a_path_or_a_port_or_refused(text: str) -> None:
    for value in (text, f"unix:{text}", f"unix:/{text}"):
        try:
            address = ADDRESS.validate_python(value)
        except ValidationError:
            continue
        path = unix_path(address)
        assert path is None or (path.startswith("/") and is_loopback(address))
        assert HostCheck(address).admits("localhost")
