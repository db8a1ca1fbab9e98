"""The router process: its ports, its status pages, and modules that it never imports."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from contract.addresses import join_address, split_address
from contract.errors import SettingError
from contract.identity import Role
from router.service import RouterService
from router.settings import RouterSettings
from serving.metric_names import ROUTER_METRICS
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.private_files import write_private
from tests.router.cluster import SECRET, Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids, model_files, write_model

PORTS = ("http", "grpc", "internal", "admin")
HELLO = Script(tokens=[*byte_ids(b"abc"), END])
SERVE = """
import asyncio, json, sys
from router.service import serve
from router.settings import RouterSettings

def started(addresses):
    sys.stdout.write(json.dumps(addresses.as_dict()) + "\\n")
    sys.stdout.flush()

asyncio.run(serve(RouterSettings(**json.loads(sys.argv[1])), started))
forbidden = {"torch", "transformers", "kv_transfer", "engine", "numpy"} & set(sys.modules)
sys.stdout.write(json.dumps(sorted(forbidden)) + "\\n")
"""


async def test_a_router_that_serves_has_not_imported_torch() -> None:
    """A2, A5, DESIGN §1: text in, text out, in a process of its own; SIGTERM ends it and nothing is left running."""
    ports: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error", "-c", SERVE, json.dumps({**ports, "secret": SECRET})),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            addresses = json.loads(await process.stdout.readline())
            worker = ScriptedWorker(
                Role.AGGREGATED, addresses["internal"], SECRET, lambda _: HELLO, model_files=model_files()
            )
            async with worker:
                assert await completion(addresses) == "abc"
                process.send_signal(signal.SIGTERM)
                assert json.loads(await process.stdout.readline()) == []
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_the_stages_of_a_start(tmp_path: Path) -> None:
    """A2: parts without ports, then the model, then ports behind which everything is there, then the workers."""
    ports: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    before = listening()
    broken = RouterService(RouterSettings(**ports, secret=SECRET, model=tmp_path))
    assert listening() == before, "parts that are not started listen to nobody"
    with pytest.raises(RuntimeError, match="not been started"):
        _ = broken.addresses
    with pytest.raises(SettingError, match=r"no config\.json"):
        await broken.start()
    assert listening() == before, "the model comes before the ports"
    await broken.stop()
    ports["worker_wait_seconds"] = 0
    service = RouterService(RouterSettings(**ports, secret=SECRET, model=write_model(tmp_path / "tiny")))
    await service.start()
    try:
        own = service.addresses.as_dict()
        assert listening() - before == {split_address(address)[1] for address in own.values()}
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{own['http']}/v1/models") as reply:
                assert [model["id"] for model in (await reply.json())["data"]] == ["tiny"]
            async with session.post(f"http://{own['http']}/v1/completions", json={"prompt": "x"}) as reply:
                assert (reply.status, "worker" in await reply.text()) == (503, True)
            assert not service.is_ready
            async with ScriptedWorker(Role.AGGREGATED, own["internal"], SECRET, lambda _: HELLO):
                async with asyncio.timeout(30):
                    await service.wait_ready()
    finally:
        await service.stop()
    assert listening() == before


async def test_ports_open_from_the_workers_to_the_operators() -> None:
    """A2: recorded by starts that fail at each port in turn; workers can attach before a client can send a request."""
    num_open_before = dict[str, int]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports: dict[str, Any] = dict.fromkeys(PORTS, "127.0.0.1:0")
        for name in PORTS:
            before = listening()
            address = join_address("127.0.0.1", taken.getsockname()[1])
            service = RouterService(RouterSettings(**{**ports, "secret": SECRET, name: address}))
            with pytest.raises(SettingError, match="cannot listen there") as caught:
                await service.start()
            assert caught.value.param == name
            num_open_before[name] = len(listening() - before)
            await service.stop()
            assert listening() == before
    assert num_open_before == {"internal": 0, "grpc": 1, "http": 2, "admin": 3}


async def test_a_request_waits_while_the_model_is_loaded_from_the_first_worker() -> None:
    """Loading a model takes a while, during which its workers are already attached."""
    async with running_cluster(HELLO, ()) as cluster:
        status, answer = await cluster.post("/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["message"].startswith("no worker is ready")) == (503, True)
        internal = cluster.service.addresses.internal
        worker = ScriptedWorker(Role.AGGREGATED, internal, SECRET, lambda _: HELLO, model_files=model_files())
        worker.may_give_files.clear()
        async with worker:
            await cluster.until(lambda state: state["workers"] and state["workers"][0]["max_requests"])
            asking = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
            assert (await cluster.get("/ready"))[0] == 503
            worker.may_give_files.set()
            status, answer = await asking
            assert (status, answer["choices"][0]["text"]) == (200, "abc")


async def completion(addresses: dict[str, str]) -> str:
    """Return one completion, requested as soon as gRPC health reports SERVING."""
    async with (
        grpc.aio.insecure_channel(addresses["grpc"]) as channel,
        aiohttp.ClientSession() as session,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        url = f"http://{addresses['http']}/v1/completions"
        async with session.post(url, json={"prompt": "x"}) as response:
            return str((await response.json())["choices"][0]["text"])


async def test_metrics_have_the_documented_names_types_and_values() -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,)) as cluster:
        await cluster.post("/v1/completions", {"prompt": [5] * 9})
        await cluster.post("/v1/completions", {"prompt": [5] * 9, "max_tokens": 2})
        await cluster.post("/v1/completions", {"prompt": [5] * 2000})
        metrics = await cluster.metrics()
        async with cluster.session.get(cluster.url("/metrics")) as response:
            families = {f.name: f.type for f in text_string_to_metric_families(await response.text())}
    assert set(families) == {f"kvbaton_{name.removesuffix('_total')}" for name in ROUTER_METRICS}
    assert families["kvbaton_time_to_first_token_seconds"] == "histogram"
    assert families["kvbaton_num_requests_waiting"] == "gauge"
    assert metrics['kvbaton_request_success_total{finished_reason="stop"}'] == 1
    assert metrics['kvbaton_request_success_total{finished_reason="length"}'] == 1
    assert metrics['kvbaton_request_errors_total{kind="invalid_request"}'] == 1
    assert metrics["kvbaton_prompt_tokens_total"] == 18
    assert metrics["kvbaton_generation_tokens_total"] == 6
    assert metrics["kvbaton_requests_admitted_total"] == 3  # one of them is found invalid later
    assert metrics['kvbaton_request_prompt_tokens_bucket{le="5.0"}'] == 0
    assert metrics['kvbaton_request_prompt_tokens_bucket{le="10.0"}'] == 2
    assert metrics["kvbaton_request_uncached_prompt_tokens_sum"] == 18
    assert metrics["kvbaton_request_generation_tokens_sum"] == 6
    assert metrics["kvbaton_time_to_first_token_seconds_count"] == 2
    assert metrics["kvbaton_inter_token_latency_seconds_count"] == 4
    assert metrics['kvbaton_workers{pool="both",state="serving"}'] == 1


async def test_a_request_shows_in_the_gauges_and_in_the_debug_state() -> None:
    async with running_cluster(Script(tokens=HELLO.tokens, stall_at=1)) as cluster:
        waiting = cluster.session.post(cluster.url("/v1/completions"), json={"prompt": "x", "stream": True})
        async with waiting as response:
            await response.content.readline()
            metrics = await cluster.metrics()
            state = await cluster.debug_state()
    assert metrics["kvbaton_num_requests_running"] == 1
    assert metrics["kvbaton_num_requests_waiting"] == 0
    assert state["requests"] == {
        "preparing": 0,
        "waiting_for_workers": 0,
        "waiting_for_first_token": 0,
        "streaming": 1,
        "finished": 0,
    }
    assert state["addresses"] == cluster.service.addresses.as_dict()
    assert (state["is_ready"], state["model"]) == (True, "tiny")
    assert {worker["role"] for worker in state["workers"]} == {"prefill", "decode"}
    decode = next(worker for worker in state["workers"] if worker["role"] == "decode")
    assert decode["num_leg_tokens"] == 17
    assert state["process"]["num_open_fds"] > 0


async def test_stop_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    async with running_cluster(Script(tokens=HELLO.tokens, stall_at=1)) as cluster:
        asking = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
        await cluster.workers["decode-0"].received.wait_for(lambda worker: len(worker.decodes) == 1)
        asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("name", ["http", "grpc", "internal", "admin"])
async def test_a_port_that_is_taken_is_named(name: str) -> None:
    async with running_cluster(HELLO, ()) as cluster:
        taken = cluster.service.addresses.http
        ports: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
        second = RouterService(RouterSettings(**{**ports, "secret": SECRET, name: taken}))
        with pytest.raises(SettingError, match="cannot listen there") as caught:
            await second.start()
        assert caught.value.param == name
        await second.stop()


def test_settings_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="secret_file is not set"):
        RouterSettings().read_secret()
    with pytest.raises(SettingError, match="cannot be read"):
        RouterSettings(secret_file=tmp_path / "none").read_secret()
    write_private(tmp_path / "secret", " \n")
    with pytest.raises(SettingError, match="is empty"):
        RouterSettings(secret_file=tmp_path / "secret").read_secret()
    write_private(tmp_path / "secret", f"{SECRET}\n")
    assert RouterSettings(secret_file=tmp_path / "secret").read_secret() == SECRET
    with pytest.raises(ValueError, match="max_queue"):
        RouterSettings(max_queue=0)
    assert RouterSettings(secret="s").masked()["secret"] == "***"
    with pytest.raises(SettingError, match="both set"):
        RouterSettings(secret="s", secret_file=tmp_path / "secret").read_secret()


def listening() -> set[int]:
    """Return the ports that this process listens on."""
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


async def test_a_router_without_public_ports_listens_for_workers_only() -> None:
    ports: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    service = RouterService(RouterSettings(**ports, secret=SECRET))
    before = listening()
    await service.start(has_public_ports=False)
    try:
        addresses = service.addresses
        assert (addresses.http, addresses.grpc, addresses.admin) == ("", "", "")
        assert listening() - before == {split_address(addresses.internal)[1]}
    finally:
        await service.stop()


async def asks(cluster: Cluster, host: str) -> None:
    """Ask the HTTP API and the gRPC health service at ``host``."""
    addresses = cluster.service.addresses
    http, grpc_address = (
        join_address(host, split_address(one)[1]) for one in (addresses.http, addresses.grpc)
    )
    async with cluster.session.post(f"http://{http}/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 200
    async with grpc.aio.insecure_channel(grpc_address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_ipv6_addresses_are_printed_as_urls_take_them() -> None:
    """The worker dials the printed one, too."""
    async with running_cluster(HELLO, (Role.AGGREGATED,), **dict.fromkeys(PORTS, "[::1]:0")) as cluster:
        for address in cluster.service.addresses.as_dict().values():
            assert address.startswith("[::1]:") and not address.endswith(":0")
        await asks(cluster, "::1")
        async with cluster.session.get(f"http://{cluster.service.addresses.admin}/ready") as response:
            assert response.status == 200


@pytest.mark.parametrize("address", [":0", "[::]:0"])
async def test_all_addresses_are_those_of_both_families(address: str) -> None:
    async with running_cluster(HELLO, (Role.AGGREGATED,), http=address, grpc=address) as cluster:
        assert cluster.service.addresses.http.startswith("[::]:")
        for host in ("127.0.0.1", "::1"):
            await asks(cluster, host)
