"""``kvbaton workers`` and ``kvbaton top``, against a real router."""

import asyncio
import json
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from cli.operate import show_again_and_again, worker_named
from contract.errors import NotFoundError
from contract.identity import Role
from launch.client_settings import TopSettings
from protos import worker_pb2 as pb
from serving.http_server import start_http
from tests.chaos.settings import process_environment
from tests.cli.test_pool_table import row_of
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_worker_admin import obey
from tests.text.tiny_model import END

SAY = Script(tokens=[END])
KEY = "an-operator's-key-of-more-than-32-characters"
UNKNOWN = "–"


async def kvbaton(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Run a command; return the exit code, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**process_environment(), "COLUMNS": "160", **environment},
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def admin(cluster: Cluster) -> tuple[str, str]:
    return "--admin", cluster.service.addresses.admin


async def test_the_list_shows_every_worker() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        load = pb.Load(num_running=7, num_waiting=2, kv_cache_usage=0.5, num_leases=3)
        cluster.workers["decode-0"].stream.report(load)
        await cluster.until(lambda state: any(worker["num_running"] for worker in state["workers"]))
        code, output, errors = await kvbaton("workers", *admin(cluster))
        assert (code, errors) == (0, "")
        heading = (
            "model tiny · 0 running · 0 waiting · 1 prefill + 1 decode · pressure 0.00 prefill + 0.59 decode"
        )
        assert output.splitlines()[0].endswith(heading)
        assert row_of("decode-0", output)[1:6] == ["decode", "serving", "0/256", "7", "2"]
        assert row_of("prefill-0", output)[1:6] == ["prefill", "serving", "0/256", UNKNOWN, UNKNOWN]
        assert output.index("prefill-0") < output.index("decode-0")
        code, output, _ = await kvbaton("workers", *admin(cluster), "--json")
        assert code == 0
        listed = {worker["id"]: worker for worker in json.loads(output)["workers"]}
        assert (listed["decode-0"]["num_leases"], listed["prefill-0"]["num_leases"]) == (3, None)
        code, output, _ = await kvbaton("top", *admin(cluster), "--once", "--json")
        assert {worker["id"] for worker in json.loads(output)["workers"]} == set(listed)
        code, output, errors = await kvbaton("top", *admin(cluster), "--once")
        assert (code, errors) == (0, "")
        assert row_of("decode-0", output)[4] == "7"


async def test_the_router_is_found_in_a_ready_file(tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    async with running_cluster(SAY, (Role.AGGREGATED,)) as cluster:
        address = cluster.service.addresses.admin
        processes = [{"role": "both", "admin": "127.0.0.1:1"}, {"role": "router", "admin": address}]
        file.write_text(json.dumps({"processes": processes}))
        code, output, errors = await kvbaton("workers", "--ready-file", str(file))
        assert (code, errors) == (0, "") and row_of("both-0", output)
        code, output, errors = await kvbaton("workers", KVBATON_READY_FILE=str(file))
        assert (code, errors) == (0, "") and row_of("both-0", output)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "cannot be used"),
        ("{}", "cannot be used"),
        ('{"processes": [{"role": "both", "admin": "x"}]}', "names no running router"),
    ],
)
async def test_a_ready_file_without_a_router_is_named(
    content: str | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "ready.json"
    if content is not None:
        file.write_text(content)
    code, output, errors = await kvbaton("workers", "--ready-file", str(file))
    assert (code, output) == (2, "")
    assert f"ready_file {file}" in errors and words in errors


async def test_the_key_is_sent_and_a_wrong_one_is_explained() -> None:
    async with running_cluster(SAY, (), admin_keys=KEY) as cluster:
        code, output, errors = await kvbaton("workers", *admin(cluster), KVBATON_ADMIN_KEY=KEY)
        assert (code, errors) == (0, "") and "no worker is attached" in output
        for environment in ({}, {"KVBATON_ADMIN_KEY": "another-key"}):
            code, output, errors = await kvbaton("workers", *admin(cluster), **environment)
            assert (code, output) == (1, "")
            assert "admin key" in errors and "KVBATON_ADMIN_KEY" in errors and "another-key" not in errors
    async with running_cluster(SAY, (), api_keys=KEY) as cluster:
        code, output, errors = await kvbaton("top", *admin(cluster), "--once", KVBATON_ADMIN_KEY=KEY)
        assert (code, output) == (1, "") and "set admin_keys_file" in errors


@pytest.mark.parametrize("command", [("workers",), ("top", "--once"), ("top",)])
async def test_no_router_is_one_line(command: Sequence[str]) -> None:
    code, output, errors = await kvbaton(*command)
    assert (code, output) == (2, "")
    assert errors.startswith("kvbaton: no router is named")
    code, output, errors = await kvbaton(*command, "--admin", "127.0.0.1:1")
    assert (code, output) == (1, "")
    assert errors == "kvbaton: no router answers at 127.0.0.1:1: Connect call failed ('127.0.0.1', 1)\n" or (
        errors == "kvbaton: no router answers at 127.0.0.1:1: Connection refused\n"
    )


async def test_another_service_is_told_apart() -> None:
    async def hello(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/admin/workers", hello)
    server = await start_http(app, "127.0.0.1:0")
    try:
        code, output, errors = await kvbaton("workers", "--admin", server.address)
    finally:
        await server.close()
    assert (code, output) == (1, "")
    assert f"{server.address} is not the admin port of a router" in errors


async def watched(cluster: Cluster, console: Console, **settings: Any) -> "asyncio.Task[None]":
    given = {"interval_seconds": 0.1, "admin": cluster.service.addresses.admin, **settings}
    return asyncio.create_task(show_again_and_again(TopSettings(**given), console))


async def until_shown(console: Console, *texts: str) -> None:
    """Wait until the console's output contains one of the texts, in what it has printed from now on."""
    file = console.file
    assert isinstance(file, StringIO)
    file.truncate(0)
    async with asyncio.timeout(240):
        while not any(text in file.getvalue() for text in texts):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("terminal", ["xterm", "dumb", None])
async def test_top_follows_the_workers_and_survives_the_router(terminal: str | None) -> None:
    """terminal: as TERM names it; None: the output is no terminal."""
    console = Console(
        file=StringIO(),
        force_terminal=terminal is not None,
        _environ={"TERM": terminal or ""},
        width=160,
        highlight=False,
    )
    async with running_cluster(SAY, (Role.AGGREGATED,)) as cluster:
        watching = await watched(cluster, console)
        await until_shown(console, "both-0")
        await cluster.add(Role.PREFILL, "late")
        await until_shown(console, "late")
        await cluster.workers["late"].die()
        async with asyncio.timeout(240):
            await cluster.service.wait_for_workers(1)
        assert not watching.done()
    await until_shown(console, "no router answers")
    # The last list stays, and whether the worker or its router was gone first depends on the moment of the reading.
    await until_shown(console, "both-0", "no worker is attached")
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


async def test_top_prints_a_line_of_json_for_each_reading() -> None:
    console = Console(file=StringIO(), width=160)
    async with running_cluster(SAY, ()) as cluster:
        watching = await watched(cluster, console, as_json=True)
        await until_shown(console, "\n")
        await until_shown(console, "\n")
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().lstrip("\0").splitlines()
    assert all(json.loads(line)["workers"] == [] for line in lines)


FULL = pb.Credit(max_requests=256, max_tokens=2**20)


async def test_a_worker_drains_and_serves_again() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        worker = cluster.workers["decode-0"]
        running = asyncio.create_task(kvbaton("workers", "drain", "dec", "--deadline", "7", *admin(cluster)))
        order = await obey(worker, pb.Credit(is_draining=True, drain_seconds=7))
        assert order.drain.deadline_seconds == 7
        await cluster.until(lambda state: any(worker["is_draining"] for worker in state["workers"]))
        assert not running.done(), "the command waits"
        worker.stream.grant(pb.Credit(is_draining=True, is_empty=True))
        code, output, errors = await running
        assert (code, errors) == (0, "")
        assert output == "decode-0 drains: 0 requests are left\ndecode-0 (decode) is empty\n"
        running = asyncio.create_task(kvbaton("workers", "undrain", "decode-0", "--json", *admin(cluster)))
        assert (await obey(worker, FULL)).HasField("undrain")
        code, output, errors = await running
        assert (code, errors, json.loads(output)["state"]) == (0, "", "serving")


async def test_a_drain_without_waiting_returns_at_once() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        command = ("workers", "drain", "decode-0", "--no-wait", *admin(cluster))
        running = asyncio.create_task(kvbaton(*command))
        await obey(cluster.workers["decode-0"], pb.Credit(is_draining=True, drain_seconds=30))
        assert await running == (0, "decode-0 (decode) is draining\n", "")


async def test_the_wait_ends_when_the_worker_has_left() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        worker = cluster.workers["decode-0"]
        running = asyncio.create_task(kvbaton("workers", "drain", "decode-0", "--json", *admin(cluster)))
        await obey(worker, pb.Credit(is_draining=True, drain_seconds=30))
        await cluster.until(lambda state: any(worker["is_draining"] for worker in state["workers"]))
        await worker.die()
        code, output, errors = await running
        assert (code, errors, json.loads(output)["state"]) == (0, "", "leaving")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("drain", "decode-1"), "the drain of worker decode-1 was cancelled; it is serving again"),
        (("flip", "decode-1", "prefill"), "decode-1 is still a decode worker: the change was undone"),
    ],
)
async def test_an_order_is_sent_once_and_another_operator_may_undo_it(
    command: tuple[str, ...], words: str
) -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        running = asyncio.create_task(kvbaton("workers", *command, *admin(cluster)))
        await obey(worker, pb.Credit(is_draining=True, drain_seconds=30))
        await cluster.until(lambda state: any(worker["is_draining"] for worker in state["workers"]))
        undone = asyncio.create_task(kvbaton("workers", "undrain", "decode-1", *admin(cluster)))
        assert (await obey(worker, FULL)).HasField("undrain"), "nothing else was ordered meanwhile"
        assert (await undone)[0] == 0
        code, _, errors = await running
        assert code == 1 and words in errors


async def test_a_worker_that_leaves_before_it_takes_its_role_is_an_error() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        running = asyncio.create_task(kvbaton("workers", "flip", "decode-1", "prefill", *admin(cluster)))
        await obey(worker, pb.Credit(is_draining=True, drain_seconds=30))
        await cluster.until(lambda state: any(worker["is_draining"] for worker in state["workers"]))
        await worker.die()
        code, _, errors = await running
        assert code == 1 and "decode-1 has left before it became a prefill worker" in errors


async def test_an_order_for_no_worker_is_one_line() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        code, output, errors = await kvbaton("workers", "drain", "decod-0", *admin(cluster))
        assert (code, output) == (1, "")
        assert errors == (
            "kvbaton: no worker is called 'decod-0' (did you mean decode-0?); "
            "the workers are decode-0, prefill-0\n"
        )


def test_a_worker_is_named_by_its_id_or_by_its_beginning() -> None:
    pool = {"workers": [{"id": name} for name in ("decode-1", "decode-10", "prefill-0")]}
    assert worker_named("decode-1", pool) == "decode-1"
    assert worker_named("p", pool) == "prefill-0"
    with pytest.raises(NotFoundError, match="ambiguous: decode-1, decode-10"):
        worker_named("decode", pool)
    with pytest.raises(NotFoundError, match="no worker is attached"):
        worker_named("decode", {"workers": []})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("drain",), "worker is not given"),
        (("list", "decode-0"), "unrecognized arguments: decode-0 (see kvbaton workers list --help)"),
        (("undrain", "w", "--deadline=3"), "deadline_seconds has no effect on 'undrain'"),
        (("--no-wait",), "wait has no effect on 'list'"),
        (("drian", "w"), "action is 'drian'"),
        (("drain", "w", "--deadline", "-1"), "deadline_seconds is '-1'"),
    ],
)
async def test_a_contradiction_is_refused(arguments: Sequence[str], words: str) -> None:
    code, output, errors = await kvbaton("workers", *arguments, "--admin", "127.0.0.1:1")
    assert (code, output) == (2, "")
    assert words in errors


async def test_a_worker_takes_another_role() -> None:
    async with running_cluster(SAY, PAIR) as cluster:
        worker = await cluster.add(Role.DECODE, "decode-1")
        running = asyncio.create_task(kvbaton("workers", "flip", "decode-1", "prefill", *admin(cluster)))
        order = await obey(worker, pb.Credit(number=2))
        assert order.role_change.role == "prefill"
        worker.stream.set_role("prefill", order.role_change.epoch)
        worker.stream.grant(FULL)
        code, output, _ = await running
        assert (code, output) == (0, "decode-1 (prefill) is serving\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("flip", "decode-0"), "role is ''"),
        (("flip", "decode-0", "router"), "role is 'router'"),
        (
            ("drain", "decode-0", "prefill"),
            "unrecognized arguments: prefill (see kvbaton workers drain --help)",
        ),
        (
            ("drain", "decode-0", "--role", "prefill"),
            "role is 'prefill': flip needs a role, and nothing else",
        ),
    ],
)
async def test_a_role_belongs_to_a_flip(words: tuple[str, ...], told: str) -> None:
    code, _, errors = await kvbaton("workers", *words, "--admin", "127.0.0.1:1")
    assert code == 2
    assert told in errors


async def test_the_prefix_caches_of_all_workers_are_dropped() -> None:
    """B16: by one command; it fails with the reason if a worker keeps its cache."""
    async with running_cluster(SAY, PAIR) as cluster:
        command = ("workers", "reset-prefix-cache", *admin(cluster))
        done = await kvbaton(*command)
        assert done == (0, "the prefix caches of prefill-0, decode-0 are dropped\n", "")
        cluster.workers["decode-0"].holds_blocks = True
        code, output, errors = await kvbaton(*command, "--json")
        assert (code, output) == (1, "")
        assert "worker decode-0 did not accept ResetPrefixCache" in errors and "blocks are held" in errors
    code, _, errors = await kvbaton("workers", "reset-prefix-cache", "decode-0")
    assert code == 2 and "unrecognized arguments: decode-0" in errors


async def test_the_weights_of_all_workers_are_reloaded() -> None:
    """B16: by one command; nothing changes if a worker cannot do so."""
    async with running_cluster(SAY, PAIR) as cluster:
        command = ("workers", "reload-weights", "--deadline", "30", *admin(cluster))
        done = await kvbaton(*command)
        assert done == (0, "the weights of prefill-0, decode-0 are reloaded\n", "")
        cluster.workers["decode-0"].reload_refusal = "it drains"
        code, output, errors = await kvbaton(*command, "--json")
        assert (code, output) == (1, "")
        assert "nothing has changed: worker decode-0 did not accept ReloadWeights" in errors
        assert "it drains" in errors
