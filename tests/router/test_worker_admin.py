"""The admin API: access, and the list of workers."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.service import RouterService
from router.settings import RouterSettings
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.private_files import write_private
from tests.router.cluster import PAIR, SECRET, Cluster, running_cluster
from tests.text.tiny_model import END, word_id

HELLO = Script(tokens=[word_id("hello"), word_id("hello"), word_id("hello"), END])
ADMIN = "an-operator's-key-of-more-than-32-characters"
CLIENT = "a-client's-key-that-has-more-than-32-characters"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def listed(cluster: Cluster, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    url = f"http://{cluster.service.addresses.admin}/admin/workers"
    async with cluster.session.get(url, headers=headers) as response:
        return response.status, await response.json()


async def workers_of(cluster: Cluster) -> dict[str, dict[str, Any]]:
    status, answer = await listed(cluster)
    assert status == 200, answer
    return {worker["id"]: worker for worker in answer["workers"]}


async def test_without_keys_this_machine_may_use_it() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        status, answer = await listed(cluster)
        assert (status, answer["workers"], answer["model"]) == (200, [], None)
        assert (answer["num_requests_waiting"], answer["num_requests_running"]) == (0, 0)


@pytest.mark.parametrize("in_file", [False, True])
async def test_an_admin_key_is_required_where_there_is_one(
    in_file: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client's key is not enough, and the admin key is no client's key."""
    caplog.set_level(logging.DEBUG)
    keys: dict[str, Any] = {"admin_keys": f"other,{ADMIN}"}
    if in_file:
        keys = {"admin_keys_file": write_private(tmp_path / "keys", f"{ADMIN} # ours\n")}
    async with running_cluster(HELLO, (Role.AGGREGATED,), api_keys=CLIENT, **keys) as cluster:
        assert (await listed(cluster, bearer(ADMIN)))[0] == 200
        for headers in ({}, bearer(CLIENT), bearer("wrong"), {"Authorization": ADMIN}):
            status, answer = await listed(cluster, headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), headers
            assert "admin key" in answer["error"]["message"]
        status, _ = await cluster.post("/v1/completions", {"prompt": "x"}, headers=bearer(ADMIN))
        assert status == 401
        async with cluster.session.get(f"http://{cluster.service.addresses.admin}/health") as response:
            assert response.status == 200
    assert ADMIN not in caplog.text
    assert "was refused for a wrong or missing key" in caplog.text


async def test_it_is_closed_where_clients_need_keys_and_operators_have_none() -> None:
    async with running_cluster(HELLO, (), api_keys=CLIENT) as cluster:
        for headers in ({}, bearer(CLIENT)):
            status, answer = await listed(cluster, headers)
            assert status == 403
            assert "set admin_keys_file" in answer["error"]["message"]


async def test_it_is_closed_to_other_machines_where_operators_have_no_key() -> None:
    async with running_cluster(HELLO, (), admin="0.0.0.0:0") as cluster:
        status, answer = await listed(cluster)
        assert (status, "other machines can reach" in answer["error"]["message"]) == (403, True)
    async with running_cluster(HELLO, (), admin="0.0.0.0:0", admin_keys=ADMIN) as cluster:
        assert (await listed(cluster, bearer(ADMIN)))[0] == 200


async def test_pages_of_other_sites_may_not_use_it() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        url = f"http://{cluster.service.addresses.admin}/admin/workers"
        async with cluster.session.get(url, headers={"Origin": "https://evil.example"}) as response:
            assert response.status == 403


def test_bad_admin_keys_stop_the_start(tmp_path: Path) -> None:
    empty = write_private(tmp_path / "keys", "# none\n")
    for given, words in (
        ({"admin_keys": " , "}, "admin_keys is set but contains no key"),
        ({"admin_keys": "a,b c"}, "admin_keys: entry 2 is not a valid key"),
        ({"admin_keys_file": empty}, "contains no key"),
    ):
        with pytest.raises(SettingError, match=words) as caught:
            RouterService(RouterSettings(secret=SECRET, **given))
        assert (caught.value.param or "").startswith("admin_keys")


def test_admin_keys_are_masked_in_the_log() -> None:
    settings = RouterSettings(secret=SECRET, admin_keys=ADMIN)
    assert settings.masked()["admin_keys"] == "***"
    assert ADMIN not in repr(settings)


async def test_the_load_of_each_pool_is_listed() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        await cluster.add(Role.DECODE, "decode-1")
        cluster.workers["decode-1"].stream.report(pb.Load(kv_cache_usage=0.34))
        await cluster.until(lambda state: state["workers"][-1]["kv_cache_usage"] > 0)
        _, answer = await listed(cluster)
        assert answer["pools"].keys() == {"prefill", "decode"}
        decode = answer["pools"]["decode"]
        assert (decode["num_workers"], decode["num_serving"], decode["queue_seconds"]) == (2, 2, 0)
        assert decode["pool_utilization"] == pytest.approx(0.17)
        assert decode["scaling_pressure"] == pytest.approx(0.2)
        cluster.workers["decode-0"].stream.grant(pb.Credit(is_draining=True, drain_seconds=600, number=2))
        await cluster.until(lambda state: state["workers"][1]["is_draining"])
        decode = (await listed(cluster))[1]["pools"]["decode"]
        assert (decode["num_workers"], decode["num_serving"]) == (2, 1)


async def test_a_figure_that_is_not_known_is_null() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        await cluster.add(Role.AGGREGATED, "w", build="7.8.9", num_blocks=100, pid=4711)
        worker = (await workers_of(cluster))["w"]
    assert worker.pop("drained_by") is None
    figures = {name for name, value in worker.items() if value is None}
    assert figures == {
        *("num_running", "num_waiting", "queued_prompt_tokens", "kv_cache_usage", "num_free_blocks"),
        *("prefix_hit_rate", "num_leases", "num_fetches", "step_seconds", "prefill_seconds_per_token"),
        *("ttft_seconds", "itl_seconds", "admin_address", "host", "gpu_used_bytes", "gpu_bytes", "group"),
        "group_size",
    }
    assert (worker["role"], worker["state"], worker["build"]) == ("both", "serving", "7.8.9")
    assert (worker["pid"], worker["num_blocks"], worker["num_legs"]) == (4711, 100, 0)
    assert worker["address"].startswith("127.0.0.1:")


async def test_the_figures_of_a_report_are_listed() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        worker = await cluster.add(Role.AGGREGATED, "w")
        worker.stream.report(
            pb.Load(
                num_running=3,
                num_waiting=1,
                kv_cache_usage=0.5,
                queued_prompt_tokens=700,
                num_free_blocks=9,
                num_leases=2,
                num_fetches=0,
                step_seconds=0.01,
                prefix_cache_queries=80,
                prefix_cache_hits=20,
                gpu_used_bytes=70,
                gpu_bytes=80,
            )
        )
        await cluster.until(lambda state: state["workers"][0]["num_running"] == 3)
        found = (await workers_of(cluster))["w"]
    assert (found["num_running"], found["num_waiting"], found["kv_cache_usage"]) == (3, 1, 0.5)
    assert (found["queued_prompt_tokens"], found["num_free_blocks"]) == (700, 9)
    assert (found["num_leases"], found["num_fetches"], found["step_seconds"]) == (2, 0, 0.01)
    assert (found["gpu_used_bytes"], found["gpu_bytes"]) == (70, 80)
    assert (found["prefix_hit_rate"], found["prefill_seconds_per_token"]) == (0.25, None)


async def test_each_latency_is_that_of_the_worker_whose_clients_see_it() -> None:
    slow = Script(tokens=HELLO.tokens, token_delay_seconds=0.02)
    async with running_cluster(slow, PAIR) as cluster:
        cluster.workers["decode-0"].stream.report(pb.Load(num_running=1))
        await cluster.until(lambda state: any(worker["num_running"] for worker in state["workers"]))
        assert (await cluster.post("/v1/completions", {"prompt": "x", "max_tokens": 4}))[0] == 200
        found = await workers_of(cluster)
    assert (found["prefill-0"]["itl_seconds"], found["decode-0"]["ttft_seconds"]) == (None, None)
    assert 0.02 <= found["prefill-0"]["ttft_seconds"] < 20
    assert 0.0 < found["decode-0"]["itl_seconds"] < 20


async def test_the_states_of_a_worker() -> None:
    async with running_cluster(HELLO, ()) as cluster:
        worker = await cluster.add(Role.AGGREGATED, "w")
        worker.stream.grant(pb.Credit())
        await cluster.until(lambda state: not state["workers"][0]["max_requests"])
        assert (await workers_of(cluster))["w"]["state"] == "starting"
        worker.stream.grant(pb.Credit(max_requests=2, max_tokens=100))
        await cluster.until(lambda state: state["workers"][0]["max_requests"])
        assert (await workers_of(cluster))["w"]["state"] == "serving"
        await worker.die()
        async with asyncio.timeout(20):
            await cluster.service.wait_for_workers(0)
        assert await workers_of(cluster) == {}


async def ordered(cluster: Cluster, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    url = f"http://{cluster.service.addresses.admin}/admin/workers/{path}"
    async with cluster.session.post(url, headers=headers) as response:
        return response.status, await response.json()


async def obey(worker: ScriptedWorker, credit: pb.Credit) -> pb.RouterMessage:
    """Answer the router's next order to this worker with a credit; return the order."""
    order = await worker.stream.next_order()
    worker.stream.grant(credit)
    return order


async def test_an_operator_drains_a_worker_and_waits_until_it_is_empty() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = cluster.workers["decode-0"]
        drained = asyncio.create_task(ordered(cluster, "decode-0/drain?deadline=7&wait=60"))
        order = await obey(worker, pb.Credit(is_draining=True, drain_seconds=7))
        assert order.drain.deadline_seconds == 7
        await cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        assert (await workers_of(cluster))["decode-0"]["state"] == "draining"
        assert not drained.done()
        worker.stream.grant(pb.Credit(is_draining=True, is_empty=True))
        status, facts = await drained
        assert (status, facts["id"], facts["state"]) == (200, "decode-0", "empty")
        undrained = asyncio.create_task(ordered(cluster, "decode-0/undrain"))
        order = await obey(worker, pb.Credit(max_requests=256, max_tokens=2**20))
        assert order.HasField("undrain")
        status, facts = await undrained
        assert (status, facts["state"]) == (200, "serving")


async def test_a_worker_is_not_empty_while_a_leg_is_on_its_way_to_it() -> None:
    """The worker had received nothing of the leg when it reported that it is empty."""
    async with running_cluster(Script(tokens=HELLO.tokens, stall_at=2), (Role.AGGREGATED,)) as cluster:
        worker = cluster.workers["both-0"]
        asking = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
        await worker.received.wait_for(lambda each: bool(each.decodes))
        drained = asyncio.create_task(ordered(cluster, "both-0/drain?wait=0.1"))
        await obey(worker, pb.Credit(is_draining=True, is_empty=True))
        status, facts = await drained
        assert (status, facts["state"], facts["num_legs"]) == (202, "draining", 1)
        asking.cancel()
        status, facts = await ordered(cluster, "both-0/drain?wait=60")
        assert (status, facts["state"], facts["num_legs"]) == (200, "empty", 0)


async def test_a_drain_that_takes_longer_than_the_wait_goes_on() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        draining = asyncio.create_task(ordered(cluster, "prefill-0/drain?wait=0.05"))
        order = await obey(cluster.workers["prefill-0"], pb.Credit(is_draining=True, drain_seconds=30))
        assert not order.drain.HasField("deadline_seconds")
        status, facts = await draining
        assert (status, facts["state"]) == (202, "draining")


async def test_a_worker_that_leaves_ends_the_wait() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = cluster.workers["prefill-0"]
        draining = asyncio.create_task(ordered(cluster, "prefill-0/drain?wait=60"))
        await obey(worker, pb.Credit(is_draining=True, drain_seconds=30))
        await worker.die()
        assert (await draining)[0] == 200


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("nobody/drain", 404, "no worker 'nobody' is attached"),
        ("nobody/undrain", 404, "no worker 'nobody' is attached"),
        ("decode-0/drain?wait=long", 400, "wait is 'long'"),
        ("decode-0/drain?deadline=-1", 400, "deadline is '-1'"),
    ],
)
async def test_a_wrong_order_is_refused_with_the_reason(path: str, status: int, text: str) -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        found, answer = await ordered(cluster, path)
        assert found == status
        assert text in answer["error"]["message"]


async def test_orders_need_the_admin_key() -> None:
    async with running_cluster(HELLO, PAIR, api_keys=CLIENT, admin_keys=ADMIN) as cluster:
        for name in ("drain", "undrain"):
            for headers in (None, bearer(CLIENT)):
                assert (await ordered(cluster, f"decode-0/{name}", headers))[0] == 401


async def test_an_operator_changes_a_workers_role_and_legs_follow_it() -> None:
    """The order goes to the worker; the router binds by the role once the worker has reported it."""
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        flipping = asyncio.create_task(ordered(cluster, "decode-1/flip?role=prefill&wait=60"))
        order = await obey(worker, pb.Credit(number=2))
        assert (order.role_change.role, order.role_change.epoch > 0) == ("prefill", True)
        await cluster.until(lambda state: state["workers"][-1]["max_requests"] == 0)
        assert (await workers_of(cluster))["decode-1"]["state"] == "changing"
        worker.stream.set_role("prefill", order.role_change.epoch)
        await cluster.until(lambda state: state["workers"][-1]["role"] == "prefill")
        assert not flipping.done()
        worker.stream.grant(pb.Credit(number=3, is_unsettled=True))  # another router has all of the credit
        await cluster.until(lambda state: state["workers"][-1]["max_requests"] == 0)
        worker.stream.grant(pb.Credit(max_requests=256, max_tokens=2**20, number=4, is_unsettled=True))
        async with asyncio.timeout(20):
            status, facts = await flipping
        assert (status, facts["role"], facts["state"]) == (200, "prefill", "serving")
        for _ in range(4):
            assert (await cluster.post("/v1/completions", {"prompt": "x"}))[0] == 200
        assert worker.received.prefills and not worker.received.decodes
        metrics = await cluster.metrics()
        assert metrics['kvbaton_flips_total{role="prefill"}'] == 1
        assert metrics['kvbaton_workers{pool="prefill",state="serving"}'] == 2


async def test_a_worker_that_is_to_change_does_not_count_for_its_role() -> None:
    """Two orders, one right after the other, must not leave a role without a worker."""
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        status, facts = await ordered(cluster, "decode-1/flip?role=prefill")
        assert (status, facts["state"]) == (202, "changing")
        status, answer = await ordered(cluster, "decode-0/flip?role=prefill")
        assert (status, "no decode worker would be left" in answer["error"]["message"]) == (400, True)
        worker.stream.grant(pb.Credit(is_draining=True, drain_seconds=30))
        await cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        assert (await workers_of(cluster))["decode-1"]["state"] == "draining"


async def test_a_router_refuses_the_second_of_two_changes_that_leave_no_worker_of_a_role() -> None:
    """Another router has ordered one of them, and may have received them in the other order: neither waits for it."""
    async with running_cluster(HELLO, PAIR) as cluster:
        first = await cluster.add(Role.DECODE, "decode-1")
        second = cluster.workers["decode-0"]
        assert not await needs_role(first, pb.Credit(number=1, next_role="prefill"))
        assert await needs_role(second, pb.Credit(number=1, next_role="prefill"))
        status, answer = await ordered(cluster, "decode-0/flip?role=prefill")
        assert (status, "no decode worker would be left" in answer["error"]["message"]) == (400, True)
        full: dict[str, Any] = {"max_requests": 256, "max_tokens": 2**20}
        assert not await needs_role(second, pb.Credit(**full, number=2))
        assert not await needs_role(first, pb.Credit(**full, number=2))
        assert not await needs_role(second, pb.Credit(number=3, next_role="prefill"))


async def test_an_operator_learns_that_a_worker_keeps_its_role() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        flipping = asyncio.create_task(ordered(cluster, "decode-1/flip?role=prefill&wait=60"))
        order = await obey(worker, pb.Credit(number=2, next_role="prefill"))
        worker.stream.set_role("decode", order.role_change.epoch)
        async with asyncio.timeout(20):
            status, answer = await flipping
        assert (status, "keeps the role decode" in answer["error"]["message"]) == (503, True), answer


async def needs_role(worker: ScriptedWorker, credit: pb.Credit) -> bool:
    """Send a credit, and return whether the router answers that the worker must keep its role."""
    worker.stream.grant(credit)
    while True:
        order = await worker.stream.next_order()
        if order.credit_use.number == credit.number:
            return order.credit_use.needs_role


async def test_a_draining_worker_takes_no_other_role() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        worker.stream.grant(pb.Credit(is_draining=True, drain_seconds=30))
        await cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        status, answer = await ordered(cluster, "decode-1/flip?role=prefill")
        assert (status, "decode-1 drains" in answer["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("decode-0/flip?role=prefill", "no decode worker would be left"),
        ("prefill-0/flip?role=decode", "no prefill worker would be left"),
        ("prefill-0/flip?role=router", "role is 'router'"),
        ("prefill-0/flip", "role is ''"),
    ],
)
async def test_a_role_that_would_leave_requests_without_a_worker_is_refused(path: str, text: str) -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        status, answer = await ordered(cluster, path)
        assert (status, text in answer["error"]["message"]) == (400, True), answer
        assert (await workers_of(cluster))["decode-0"]["state"] == "serving"


async def test_a_role_that_no_worker_has_is_ignored() -> None:
    async with running_cluster(HELLO, PAIR) as cluster:
        worker = cluster.workers["decode-0"]
        worker.stream.set_role("router", 1)
        worker.stream.grant(pb.Credit(max_requests=7, max_tokens=2**20))
        await cluster.until(lambda state: any(w["max_requests"] == 7 for w in state["workers"]))
        assert (await workers_of(cluster))["decode-0"]["role"] == "decode"
