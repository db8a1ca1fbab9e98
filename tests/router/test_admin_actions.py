"""The actions of a router's admin port, and who may use them."""

import asyncio
import logging

import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_worker_admin import ADMIN, bearer, obey
from tests.text.tiny_model import END

HELLO = Script(tokens=[END])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "workers/both-0/drain"),
        ("POST", "workers/both-0/undrain"),
        ("POST", "workers/both-0/flip?role=decode"),
        ("POST", "reset_prefix_cache"),
        ("POST", "reload_weights"),
        ("PUT", "scaling"),
        ("DELETE", "workers/both-0"),
    ],
)
async def test_each_action_needs_the_key(method: str, path: str) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,), admin_keys=ADMIN) as cluster:
        url = f"http://{cluster.service.addresses.admin}/admin/{path}"
        for headers in ({}, bearer("wrong")):
            async with cluster.session.request(method, url, headers=headers) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (401, "invalid_api_key")
                assert response.headers["WWW-Authenticate"] == "Bearer"


async def test_the_log_names_the_operator_of_an_action(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_cluster(HELLO, (Role.AGGREGATED,), admin_keys=ADMIN) as cluster:
        url = f"http://{cluster.service.addresses.admin}/admin/workers/both-0/drain"
        drained = asyncio.create_task(cluster.session.post(url, headers=bearer(ADMIN)))
        await obey(cluster.workers["both-0"], pb.Credit(is_draining=True, drain_seconds=7))
        (await drained).release()
    assert "worker both-0 is drained by 127.0.0.1 with admin key " in caplog.text
    assert ADMIN not in caplog.text
