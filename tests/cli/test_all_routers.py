"""``kvbaton workers`` and ``kvbaton top`` with several routers."""

import asyncio
import json

import pytest
from aiohttp import web

from contract.identity import Role
from protos import worker_pb2 as pb
from serving.http_server import start_http
from tests.cli.test_operate import SAY, kvbaton
from tests.cli.test_pool_table import drawn, figures, row_of
from tests.router.cluster import PAIR, running_cluster
from tests.router.test_worker_admin import obey

ROUTER = {
    "admin": "10.0.0.1:9101",
    "host": "gateway",
    "is_ready": True,
    "num_requests_running": 3,
    "num_requests_waiting": 0,
    "requests_per_second": 2.5,
    "tokens_per_second": 1234.5,
    "errors_per_second": 0.0,
    "replays_per_second": 0.25,
    "recomputed_per_second": 0.1,
    "num_restarts": 2,
    "age_seconds": 3 * 3600.0,
}


def test_routers_are_rows_and_a_silent_one_says_so() -> None:
    silent = {"admin": "10.0.0.2:9101", "error": "no router answers"}
    worker = figures(
        "decode-0", "decode", host="node-7", num_restarts=1, num_failed_pairs=2, age_seconds=59.0
    )
    text = "\n".join(drawn(240, worker, routers=[ROUTER, silent]))
    assert row_of("10.0.0.1:9101", text) == [
        *(
            "10.0.0.1:9101",
            "ready",
            "3",
            "0",
            "2.5",
            "1234",
            "0.0",
            "0.2",
            "4.0",
            "%",
            "2",
            "3",
            "h",
            "gateway",
        ),
    ]
    assert row_of("10.0.0.2:9101", text)[1] == "silent"
    assert row_of("decode-0", text)[-6:-1] == ["1", "2", "59", "s", "node-7"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_table_of_routers_fits_a_narrow_terminal(width: int) -> None:
    lines = drawn(width, figures("w", "both"), routers=[ROUTER])
    assert all("…" not in line and len(line) <= width for line in lines)
    assert row_of("10.0.0.1:9101", "\n".join(lines))[1] == "ready"


async def test_all_routers_of_a_service_are_read_and_one_that_hangs_is_shown() -> None:
    """Each router has its own requests; a worker of both stands in one row."""

    async def hang(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/admin/workers", hang)
    hanging = await start_http(app, "127.0.0.1:0")
    async with running_cluster(SAY, PAIR) as one, running_cluster(SAY, ()) as other:
        await other.add(Role.DECODE, "decode-0")
        await other.add(Role.DECODE, "elsewhere")
        both = f"{one.service.addresses.admin},{other.service.addresses.admin},{hanging.address}"
        code, output, errors = await kvbaton("workers", "--admin", both, "--json")
        assert (code, errors) == (0, "")
        pool = json.loads(output)
        assert sorted(worker["id"] for worker in pool["workers"]) == ["decode-0", "elsewhere", "prefill-0"]
        (shared,) = (worker for worker in pool["workers"] if worker["id"] == "decode-0")
        assert shared["max_requests"] == 512, "the shares of both routers"
        routers = {router["admin"]: router for router in pool["routers"]}
        assert "does not answer" in routers[hanging.address]["error"]
        assert routers[one.service.addresses.admin]["is_ready"]
        code, output, errors = await kvbaton("top", "--admin", both, "--once")
        assert (code, errors) == (0, "")
        assert row_of(hanging.address, output)[1] == "silent"
        drained = asyncio.create_task(kvbaton("workers", "drain", "elsewhere", "--no-wait", "--admin", both))
        await obey(other.workers["elsewhere"], pb.Credit(is_draining=True, drain_seconds=30))
        assert (await drained)[0] == 0, "the order reaches the router that has the worker"
    await hanging.close()
