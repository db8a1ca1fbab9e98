"""Workers attach, are rejected, are replaced, and leave."""

import asyncio
import socket
from typing import Any

import grpc
import pytest

from contract.identity import Role
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import ROUTER_NAME, worker_tls
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker, kv_layout
from tests.router.cluster import SECRET, running_cluster
from tests.text.tiny_model import END, byte_ids, write_model

SAY = Script(tokens=[*byte_ids(b"ab"), END])
TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"protocol_min": 4, "protocol_max": 5}, "speaks protocol 4..5, this router 3..3"),
        ({"protocol_min": 1, "protocol_max": 1}, "speaks protocol 1..1, this router 3..3"),
        ({"protocol_min": 0, "protocol_max": 0}, "speaks protocol 0..0"),
        ({"model_fingerprint": "model-b@float32"}, "model-b@float32, this router serves model-a@float32"),
        ({"kv_layout": kv_layout(block_size=24)}, "(the peer): block_size: ours is 24, the peer's is 16"),
        ({"kv_layout": kv_layout(dtype="float16")}, "dtype: ours is float16, the peer's is float32"),
        ({"kv_layout": None}, "lacks kv_layout"),
        ({"role": "router"}, "role is 'router'"),
        ({"worker_id": ""}, "lacks worker_id"),
        ({"boot_id": ""}, "lacks boot_id"),
        ({"role": "prefill", "control_address": ""}, "lacks control_address"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    async with running_cluster(SAY) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.add(Role.DECODE, "new", **overrides)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert words in (caught.value.details() or "")
        workers = (await cluster.debug_state())["workers"]
        assert {worker["worker_id"] for worker in workers} == {"prefill-0", "decode-0"}


async def test_a_worker_whose_kv_can_be_converted_is_taken() -> None:
    """Its peers make a plan of it at their handshake."""
    layout = kv_layout(block_size=32, dtype="bfloat16")
    async with running_cluster(SAY) as cluster:
        await cluster.add(Role.DECODE, "new", model_fingerprint="model-a@bfloat16", kv_layout=layout)
        workers = (await cluster.debug_state())["workers"]
        assert {worker["worker_id"] for worker in workers} == {"prefill-0", "decode-0", "new"}


async def test_a_worker_of_a_later_protocol_range_that_overlaps_is_taken() -> None:
    async with running_cluster(SAY, ()) as cluster:
        await cluster.add(Role.AGGREGATED, protocol_min=1, protocol_max=9)
        await cluster.service.wait_ready()
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        assert len((await cluster.debug_state())["workers"]) == 1


async def test_a_stranger_without_the_secret_is_refused() -> None:
    """H4: it has no certificate of the cluster, and takes none of the router's."""
    async with running_cluster(SAY) as cluster:
        stranger = ScriptedWorker(
            Role.DECODE, cluster.service.addresses.internal, "guess" * 8, lambda _: SAY, worker_id="x"
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stranger.start()
        await stranger.stop()
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len((await cluster.debug_state())["workers"]) == 2


async def test_a_worker_cannot_register_as_another() -> None:
    """H4: worker id and boot id are those of the certificate."""
    async with running_cluster(SAY) as cluster:
        tls = worker_tls(SECRET, "mallory", "boot")
        async with tls.channel(cluster.service.addresses.internal, ROUTER_NAME, []) as channel:
            stub: Any = worker_pb2_grpc.MembershipStub(channel)
            for ids in (("prefill-0", "boot"), ("mallory", "other boot"), ("mallory", ""), ("", "boot")):
                registration = pb.Registration(worker_id=ids[0], boot_id=ids[1], role="prefill")
                call = stub.Attach(iter([pb.WorkerMessage(registration=registration)]))
                with pytest.raises(grpc.aio.AioRpcError, match="this certificate is not for worker"):
                    await call.read()
        assert {worker["worker_id"] for worker in (await cluster.debug_state())["workers"]} == {
            "prefill-0",
            "decode-0",
        }


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a\0", "\u202e", "x" * 300])
async def test_an_id_with_control_characters_is_refused(name: str) -> None:
    """H3: control characters are refused in ids, here too."""
    async with running_cluster(SAY, ()) as cluster:
        with pytest.raises(grpc.aio.AioRpcError, match="invalid worker_id"):
            await cluster.add(Role.DECODE, name)


async def test_a_first_message_that_is_no_registration_is_refused() -> None:
    async with (
        running_cluster(SAY) as cluster,
        worker_tls(SECRET, "w", "b").channel(cluster.service.addresses.internal, ROUTER_NAME, []) as channel,
    ):
        stub: Any = worker_pb2_grpc.MembershipStub(channel)
        call = stub.Attach(iter([pb.WorkerMessage(load=pb.Load())]))
        with pytest.raises(grpc.aio.AioRpcError, match="role is ''"):
            await call.read()


async def test_a_process_that_registers_again_replaces_its_old_stream() -> None:
    stall = Script(tokens=SAY.tokens, stall_at=1)
    async with running_cluster(stall, (), max_replays=0) as cluster:
        await cluster.add(Role.PREFILL)
        old = await cluster.add(Role.DECODE, "decode-0", boot_id="one-process")
        await cluster.service.wait_ready()
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await old.received.wait_for(lambda worker: len(worker.decodes) == 1)
        cluster.script = lambda _: SAY
        new = await cluster.add(Role.DECODE, "decode-0", boot_id="one-process")
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (503, "worker_lost")
        assert "registered again with boot id" in answer["error"]["message"]
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        assert (len(old.received.decodes), len(new.received.decodes)) == (1, 1)
        assert len((await cluster.debug_state())["workers"]) == 2


async def test_a_second_worker_with_the_same_id_is_refused_while_the_first_lives() -> None:
    """Costly choice: they detached each other; now the second one is rejected with the reason."""
    async with running_cluster(SAY, peer_timeout_seconds=0.2) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.add(Role.DECODE, "decode-0")
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        assert "another process with this worker id is attached" in str(caught.value.details())
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200
        assert len((await cluster.debug_state())["workers"]) == 2


async def test_a_worker_that_starts_again_takes_over_when_its_dead_stream_is_noticed() -> None:
    """Costly choice: its machine failed and left the stream open, and its successor waits until that is noticed."""
    async with running_cluster(SAY, (), peer_timeout_seconds=0.6) as cluster:
        host, port = cluster.service.addresses.internal.split(":")
        async with Proxy(host, int(port)) as proxy:
            dead = ScriptedWorker(Role.AGGREGATED, proxy.address, SECRET, lambda _: SAY, worker_id="both-0")
            async with dead:
                proxy.freeze()
                await cluster.add(Role.AGGREGATED, "both-0")
                assert len((await cluster.debug_state())["workers"]) == 1
                assert not dead.is_dead


async def test_health_follows_the_workers() -> None:
    async with running_cluster(SAY) as cluster:
        assert (await cluster.get("/health")) == (200, {"status": "ok"})
        await cluster.workers["decode-0"].die()
        async with asyncio.timeout(20):
            await cluster.service.wait_for_workers(1)
        assert (await cluster.get("/health"))[0] == 503
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 503
        await cluster.add(Role.DECODE, "decode-1")
        assert (await cluster.get("/health"))[0] == 200
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200


async def test_load_decides_between_equals() -> None:
    async with running_cluster(Script(tokens=SAY.tokens, stall_at=0), ()) as cluster:
        busy, idle = await cluster.add(Role.AGGREGATED, "busy"), await cluster.add(Role.AGGREGATED, "idle")
        await cluster.service.wait_ready()
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await busy.received.wait_for(lambda worker: len(worker.decodes) == 1)
        busy.stream.report(pb.Load(num_running=3, num_waiting=1, kv_cache_usage=0.5))
        name = busy.received.decodes[0].task.request_id
        busy.stream.send(pb.TokenEntry(request_id=name, token_ids=[END], finish_reason="stop"))
        assert (await asking)[0] == 200
        # The load came before the token on the worker's stream.
        cluster.script = lambda _: SAY
        for _ in range(3):
            await cluster.post(TEXT, {"prompt": "x"})
        assert (len(busy.received.decodes), len(idle.received.decodes)) == (1, 3)


async def test_a_request_waits_for_a_full_kv_cache() -> None:
    """It is bound as soon as the worker reports room, with tokens of another request."""
    async with running_cluster(Script(tokens=SAY.tokens, stall_at=0), ()) as cluster:
        worker = await cluster.add(Role.AGGREGATED, "full")
        await cluster.service.wait_ready()
        worker.stream.report(pb.Load(num_running=1, kv_cache_usage=0.96))
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await worker.received.wait_for(lambda worker: len(worker.decodes) == 1)
        cluster.script = lambda _: SAY
        second = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        assert not (await asyncio.wait({second}, timeout=0.2))[0] and len(worker.received.decodes) == 1
        entry = pb.TokenEntry(request_id=worker.received.decodes[0].task.request_id, token_ids=[END])
        worker.stream.send(entry, load=pb.Load(num_running=1, kv_cache_usage=0.94))
        async with asyncio.timeout(10):
            assert (await second)[0] == 200 and not first.done()
        first.cancel()


async def test_the_model_is_learnt_from_the_first_worker_that_can_say_it() -> None:
    async with running_cluster(SAY, ()) as cluster:
        mute = ScriptedWorker(
            Role.AGGREGATED,
            cluster.service.addresses.internal,
            SECRET,
            lambda _: SAY,
            worker_id="mute",
            registration={"max_model_len": 128},
        )
        async with mute:
            assert (await cluster.get("/v1/models"))[1]["data"] == []
            await cluster.add(Role.AGGREGATED)
            async with asyncio.timeout(20):
                await cluster.service.wait_ready()
            status, models = await cluster.get("/v1/models")
            (model,) = models["data"]
            assert (status, model["id"], model["max_model_len"]) == (200, "tiny", 128)
            assert model["created"] > 1_700_000_000
            assert model["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
            assert (await cluster.get("/v1/models/tiny"))[1] == model
            status, answer = await cluster.get("/v1/models/other/name")
            assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_the_model_is_read_from_a_folder_and_named_as_told(tmp_path: Any) -> None:
    folder = write_model(tmp_path / "on-disk")
    async with running_cluster(SAY, model=folder, served_model_name="mine") as cluster:
        assert (await cluster.get("/v1/models"))[1]["data"][0]["id"] == "mine"
        status, answer = await cluster.post(TEXT, {"prompt": "x", "model": "mine"})
        assert (status, answer["model"]) == (200, "mine")


async def test_the_model_has_several_names(tmp_path: Any) -> None:
    """An answer has the name that its request has, or the first one."""
    folder = write_model(tmp_path / "on-disk")
    async with running_cluster(SAY, model=folder, served_model_name="mine, gpt-4o") as cluster:
        assert [model["id"] for model in (await cluster.get("/v1/models"))[1]["data"]] == ["mine", "gpt-4o"]
        assert (await cluster.get("/v1/models/gpt-4o"))[1]["id"] == "gpt-4o"
        for fields, name in (({"model": "gpt-4o"}, "gpt-4o"), ({"model": "mine"}, "mine"), ({}, "mine")):
            status, answer = await cluster.post(TEXT, {"prompt": "x", **fields})
            assert (status, answer["model"]) == (200, name)
        assert (await cluster.post(TEXT, {"prompt": "x", "model": "mine, gpt-4o"}))[0] == 404


async def test_the_shortest_worker_limits_the_model() -> None:
    async with running_cluster(SAY, ()) as cluster:
        await cluster.add(Role.PREFILL, max_model_len=64)
        await cluster.add(Role.DECODE, max_model_len=100)
        await cluster.service.wait_ready()
        status, answer = await cluster.post(TEXT, {"prompt": [5] * 64, "max_tokens": 5})
        assert status == 400
        assert "context length is 64 tokens" in answer["error"]["message"]


async def test_a_worker_that_falls_silent_is_lost() -> None:
    """Its connection stays open but nothing answers any more: gRPC's keepalive ends it."""
    async with running_cluster(SAY, (), peer_timeout_seconds=0.4) as cluster:
        host, port = cluster.service.addresses.internal.split(":")
        async with Proxy(host, int(port)) as proxy:
            worker = ScriptedWorker(Role.AGGREGATED, proxy.address, SECRET, lambda _: SAY)
            async with worker:
                assert len((await cluster.debug_state())["workers"]) == 1
                proxy.freeze()
                async with asyncio.timeout(20):
                    await cluster.service.wait_for_workers(0)


class Proxy:
    """Passes bytes between a worker and the router, until it is frozen: then both sides wait for ever."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._frozen = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, family=socket.AF_INET)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        self._server.close()

    def freeze(self) -> None:
        """Drop all bytes from now on."""
        self._frozen.set()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._writers += [writer, back]
        self._tasks += [
            asyncio.create_task(self._pump(reader, back)),
            asyncio.create_task(self._pump(there, writer)),
        ]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self._frozen.is_set():
                writer.write(data)
