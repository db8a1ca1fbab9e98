"""The admin port, over real HTTP on a free port."""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contract.errors import SettingError
from serving.admin import AdminServer
from serving.metrics import EngineCollector


class Service:
    """The state that an admin port reports."""

    missing: str | None = None

    async def state(self) -> dict[str, Any]:
        return {"blocks": {"free": 7}, "roles": {"decode"}}

    async def metrics(self) -> EngineCollector:
        counters = {"num_requests_running": 3.0, "transfer_blocks_total{transport=tcp}": 12.0}
        return EngineCollector(counters, {"worker": "w", "role": "decode", "build": "1"})


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    service = Service()
    server = AdminServer(
        "127.0.0.1:0", missing=lambda: service.missing, state=service.state, metrics=service.metrics
    )
    await server.start()
    yield service, f"http://{server.address}"
    await server.stop()


async def get(url: str) -> tuple[int, str, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, response.headers["Content-Type"], await response.text()


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_is_200_while_nothing_is_missing_and_503_after(
    path: str, service: tuple[Service, str]
) -> None:
    state, url = service
    status, _, text = await get(f"{url}{path}")
    assert (status, text) == (200, '{"status": "ok"}')
    state.missing = "no router is attached"
    status, _, text = await get(f"{url}{path}")
    assert (status, text) == (503, '{"status": "unavailable", "reason": "no router is attached"}')


async def test_metrics_are_the_old_text_format_whatever_is_asked_for(service: tuple[Service, str]) -> None:
    _, url = service
    headers = {"Accept": "application/openmetrics-text;version=1.0.0;q=0.9"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    (sample,) = families["kvbaton_transfer_blocks"].samples
    assert (sample.name, sample.labels, sample.value) == (
        "kvbaton_transfer_blocks_total",
        {"transport": "tcp"},
        12.0,
    )
    assert families["kvbaton_num_requests_running"].type == "gauge"


async def test_debug_state_holds_the_service_and_the_process(service: tuple[Service, str]) -> None:
    _, url = service
    async with aiohttp.ClientSession() as session, session.get(f"{url}/debug/state") as response:
        state = await response.json()
    assert state["blocks"] == {"free": 7}
    facts = state["process"]
    assert facts["pid"] == os.getpid()
    assert facts["num_open_fds"] > 3
    assert facts["num_asyncio_tasks"] >= 1
    assert facts["rss_bytes"] > 2**20


async def test_a_taken_port_is_refused_by_name(service: tuple[Service, str]) -> None:
    state, url = service
    address = url.removeprefix("http://")
    second = AdminServer(address, missing=lambda: None, state=state.state, metrics=state.metrics)
    with pytest.raises(SettingError, match=f"admin is {address}: cannot listen there"):
        await second.start()


async def test_a_stopped_server_leaves_no_task_behind() -> None:
    service = Service()
    before = asyncio.all_tasks()
    server = AdminServer("127.0.0.1:0", missing=lambda: None, state=service.state, metrics=service.metrics)
    await server.start()
    await get(f"http://{server.address}/health")
    await server.stop()
    await server.stop()
    assert asyncio.all_tasks() == before
