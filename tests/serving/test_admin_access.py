"""Access to the actions of an admin port, over real HTTP on a free port."""

import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from serving.admin import AdminServer
from serving.admin_access import AdminAccess, AdminKeyOptions, socket_owner

KEY = "admin-key-of-more-than-32-characters"
METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND")
PATHS = ("/act", "/health", "/metrics", "/admin/list", "/nothing", "/admin/nothing")


class Actions:
    """An admin port with one action, and one page for operators."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.address = ""
        self.access = AdminAccess(AdminKeyOptions())

    async def act(self, request: web.Request) -> web.Response:
        self.done.append(self.access.requester(request))
        return web.json_response({})

    async def ask(self, method: str, path: str, **headers: str) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://{self.address}{path}", headers=headers) as response,
        ):
            return response.status


@asynccontextmanager
async def serving(access: AdminAccess | None, host: str = "127.0.0.1") -> AsyncIterator[Actions]:
    actions = Actions()
    actions.access = access or actions.access

    async def state() -> dict[str, Any]:
        return {}

    routes = [
        web.post("/act", actions.act),
        web.get("/admin/list", actions.act),
        web.delete("/act", actions.act),
    ]
    server = AdminServer(f"{host}:0", missing=lambda: None, state=state, access=access, routes=routes)
    await server.start()
    actions.address = server.address
    try:
        yield actions
    finally:
        await server.stop()


async def test_no_action_passes_without_a_key() -> None:
    """A key is asked for by the method: a route that is added later is closed, too."""
    async with serving(AdminAccess(AdminKeyOptions(admin_keys=KEY))) as actions:
        for path in PATHS:
            for method in METHODS:
                assert await actions.ask(method, path) == 401, (method, path)
        assert await actions.ask("GET", "/admin/list") == 401
        assert await actions.ask("GET", "/%61dmin/list") == 401
        assert await actions.ask("GET", "/health") == 200
        assert actions.done == []


async def test_an_operator_is_named_by_a_digest_of_the_key() -> None:
    async with serving(AdminAccess(AdminKeyOptions(admin_keys=KEY))) as actions:
        assert await actions.ask("POST", "/act", Authorization=f"Bearer {KEY}") == 200
    (requester,) = actions.done
    assert requester.startswith("127.0.0.1 with admin key ")
    assert KEY not in requester


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_without_keys_it_is_open_to_one_user_of_this_machine(host: str) -> None:
    own, other = os.geteuid(), os.geteuid() + 1
    async with serving(AdminAccess(AdminKeyOptions(), users=frozenset({own})), host) as actions:
        assert await actions.ask("POST", "/act") == 200
        assert actions.done == [f"{host.strip('[]')} (user {own})"]
    async with serving(AdminAccess(AdminKeyOptions(), users=frozenset({other})), host) as actions:
        assert await actions.ask("POST", "/act") == 403
        assert await actions.ask("GET", "/admin/list") == 200
        assert len(actions.done) == 1


async def test_a_port_without_access_has_no_actions() -> None:
    async with serving(None) as actions:
        for method in METHODS:
            assert await actions.ask(method, "/act") == 403
        assert await actions.ask("GET", "/admin/list") == 403
        assert await actions.ask("GET", "/health") == 200
        assert actions.done == []


async def test_a_refused_request_is_logged_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(AdminAccess(AdminKeyOptions(admin_keys=KEY))) as actions:
        await actions.ask("POST", "/act", Authorization="Bearer wrong")
    assert "127.0.0.1 was refused for a wrong or missing key" in caplog.text


def test_a_closed_socket_is_not_taken_for_roots() -> None:
    """The kernel shows root as the user of a socket that has no process any more."""
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 0100007F:C350 01 0:0 00:0 0     0        0 72522 1 0 100 0 0 10 0\n"
        "   1: 0100007F:C350 0100007F:1F90 05 0:0 00:0 0     0        0 0 1 0 100 0 0 10 0\n"
    )
    host = ipaddress.ip_address("127.0.0.1")
    client, server = (host, 0xC350), (host, 0x1F90)
    assert socket_owner(table, client, server) is None
    assert socket_owner(table.replace("0 0 1 0 100", "0 9 1 0 100"), client, server) == 0
    assert socket_owner(table, server, client) == 0


def test_the_kernel_names_this_process_as_the_owner_of_its_sockets() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        ends = [
            (ipaddress.ip_address(host), port) for host, port in (client.getsockname(), server.getsockname())
        ]
        assert socket_owner(Path("/proc/net/tcp").read_text(), *ends) == os.geteuid()
