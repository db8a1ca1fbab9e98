"""/v1/batches: lines are answered by the handlers' code, errors are lines of the error file, input is validated."""

from pathlib import Path
from typing import Any

import pytest

from contract.errors import WorkerLostError
from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.batch_cluster import (
    ABC,
    CHAT,
    STUCK,
    TEXT,
    batch_over,
    batch_when,
    call,
    create,
    filing_cluster,
    jsonl,
    key,
    lines_of,
    prompts,
    request_line,
    upload,
)
from tests.router.cluster import Cluster
from tests.text.tiny_model import byte_ids

HI = [{"role": "user", "content": "hi"}]


async def whole(
    cluster: Cluster, content: bytes, endpoint: str = TEXT
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Run a batch to its end; return the batch, its output lines and its error lines."""
    batch = await batch_over(cluster, (await create(cluster, content, endpoint))["id"])
    outputs = await lines_of(cluster, batch["output_file_id"])
    return batch, outputs, await lines_of(cluster, batch["error_file_id"])


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (CHAT, {"messages": HI}, "chat.completion"),
        (TEXT, {"prompt": ["x", "y"], "n": 2, "logprobs": 1}, "text_completion"),
        ("/v1/responses", {"input": "hi"}, "response"),
        ("/v1/embeddings", {"input": ["x", "y"]}, "list"),
    ],
)
async def test_a_line_is_answered_as_http_answers_its_body(
    tmp_path: Path, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    def shape(value: Any) -> Any:
        """Return the answer without the parts that differ between requests."""
        if isinstance(value, dict):
            different = ("id", "created", "created_at", "completed_at")
            return {name: shape(inner) for name, inner in value.items() if name not in different}
        return [shape(inner) for inner in value] if isinstance(value, list) else value

    async with filing_cluster(tmp_path) as cluster:
        status, direct = await cluster.post(endpoint, {"model": "tiny", **body})
        assert (status, direct["object"]) == (200, kind)
        batch, [line], errors = await whole(cluster, jsonl(request_line("a", endpoint, **body)), endpoint)
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert (line["custom_id"], line["error"], errors) == ("a", None, [])
    response = line["response"]
    assert response["status_code"] == 200
    assert response["request_id"] == response["body"].get("id", response["request_id"])
    assert shape(response["body"]) == shape(direct)
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)


async def test_the_batch_object_has_openais_fields(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path) as cluster:
        made = await create(cluster, prompts(3), metadata={"run": "7"})
        assert (made["object"], made["status"]) == ("batch", "validating")
        assert (made["output_file_id"], made["error_file_id"], made["errors"]) == (None, None, None)
        assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert made["expires_at"] - made["created_at"] == 24 * 3600
        batch = await batch_over(cluster, made["id"])
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert batch["metadata"] == {"run": "7"}
        times = [batch[f"{name}_at"] for name in ("created", "in_progress", "finalizing", "completed")]
        assert times == sorted(times)
        assert [batch[f"{name}_at"] for name in ("failed", "expired", "cancelling", "cancelled")] == [
            None
        ] * 4
        status, file = await call(cluster, "GET", f"/v1/files/{batch['output_file_id']}")
        assert (status, file["purpose"]) == (200, "batch_output")
        assert file["filename"] == f"{batch['id']}_output.jsonl"
        names = {line["custom_id"] for line in await lines_of(cluster, batch["output_file_id"])}
        assert names == {"r0", "r1", "r2"}
        metrics = await cluster.metrics()
        assert metrics['kvbaton_num_batches{status="completed"}'] == 1
        assert metrics['kvbaton_batch_requests_total{result="completed"}'] == 3
        assert metrics["kvbaton_num_file_bytes"] == len(prompts(3)) + file["bytes"]


async def test_a_request_that_is_refused_is_a_line_of_the_error_file(tmp_path: Path) -> None:
    content = jsonl(
        request_line("good", prompt="x"),
        request_line("hot", prompt="x", temperature=9),
        request_line("streamed", prompt="x", stream=True),
        request_line("urgent", prompt="x", priority=1),
        request_line("long", prompt="x" * 500),
        {**request_line("elsewhere"), "body": {"model": "other", "prompt": "x"}},
    )
    async with filing_cluster(tmp_path) as cluster:
        batch, [good], errors = await whole(cluster, content)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 6, "completed": 1, "failed": 5}
    assert (good["custom_id"], good["response"]["body"]["choices"][0]["text"]) == ("good", "abc")
    told = {
        line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]["error"])
        for line in errors
    }
    assert {name: (status, error["param"]) for name, (status, error) in told.items()} == {
        "hot": (400, "temperature"),
        "streamed": (400, "stream"),
        "urgent": (400, "priority"),
        "long": (400, "prompt"),
        "elsewhere": (404, "model"),
    }
    assert all(line["error"] is None for line in errors)


GOOD = request_line("a", prompt="x")


@pytest.mark.parametrize(
    ("content", "problems"),
    [
        (b"", [("empty_file", None)]),
        (jsonl(GOOD) + b"\n", [("invalid_json_line", 2)]),
        (b"\n" + jsonl(GOOD), [("invalid_json_line", 1)]),
        (b"{\n" + jsonl(GOOD), [("invalid_json_line", 1)]),
        (jsonl(GOOD) + b"\xff\n", [("invalid_json_line", 2)]),
        (b"[" * 9_000, [("invalid_json_line", 1)]),
        (jsonl(GOOD)[:-10], [("invalid_json_line", 1)]),
        (jsonl(GOOD, {**GOOD, "custom_id": "b"}, GOOD), [("duplicate_custom_id", 3)]),
        (jsonl({**GOOD, "url": CHAT}), [("url_mismatch", 1)]),
        (jsonl({**GOOD, "method": "GET"}), [("invalid_method", 1)]),
        (jsonl({**GOOD, "custom_id": ""}), [("invalid_custom_id", 1)]),
        (jsonl({**GOOD, "custom_id": "x" * 513}), [("invalid_custom_id", 1)]),
        (jsonl({**GOOD, "custom_id": 1}), [("invalid_request", 1)]),
        (jsonl({**GOOD, "body": [1]}), [("invalid_request", 1)]),
        (jsonl({"custom_id": "a"}), [("invalid_request", 1)]),
        (jsonl(GOOD, request_line("b"), request_line("c"), request_line("d")), [("too_many_tasks", None)]),
        (b"x" * 20_000, [("line_too_long", 1)]),
        (
            b"{\n[\n" + jsonl({**GOOD, "url": "/"}),
            [("invalid_json_line", 1), ("invalid_json_line", 2), ("url_mismatch", 3)],
        ),
    ],
)
async def test_an_input_that_is_not_valid_fails_the_batch(
    tmp_path: Path, content: bytes, problems: list[tuple[str, int | None]]
) -> None:
    async with filing_cluster(tmp_path, batches_max_lines=3, max_body_bytes=10_000) as cluster:
        batch, outputs, errors = await whole(cluster, content)
        assert not cluster.workers["both-0"].received.decodes
    assert (batch["status"], outputs, errors) == ("failed", [], [])
    assert batch["failed_at"] >= batch["created_at"]
    assert batch["errors"]["object"] == "list"
    assert [(problem["code"], problem["line"]) for problem in batch["errors"]["data"]] == problems
    assert all(set(problem) == {"code", "message", "param", "line"} for problem in batch["errors"]["data"])


async def test_problems_are_listed_up_to_a_hundred(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path) as cluster:
        batch, _, _ = await whole(cluster, b"x\n" * 1000)
    assert [problem["line"] for problem in batch["errors"]["data"]] == list(range(1, 101))


async def test_a_last_line_without_its_end_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path) as cluster:
        batch, outputs, _ = await whole(cluster, b"\xef\xbb\xbf" + prompts(2).rstrip(b"\n"))
    assert (batch["status"], len(outputs)) == ("completed", 2)


async def test_an_invalid_batch_is_rejected_by_name(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path) as cluster:
        file_id = await upload(cluster, prompts(1))
        good = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
        batch = await batch_over(cluster, (await create(cluster, prompts(1)))["id"])
        for change, status, param in (
            ({"input_file_id": "file-none"}, 404, "input_file_id"),
            ({"input_file_id": "../lock"}, 404, "input_file_id"),
            ({"input_file_id": None}, 400, "input_file_id"),
            ({"input_file_id": batch["output_file_id"]}, 400, "input_file_id"),
            ({"endpoint": "/v1/models"}, 400, "endpoint"),
            ({"endpoint": None}, 400, "endpoint"),
            ({"completion_window": "1h"}, 400, "completion_window"),
            ({"metadata": {"a": 1}}, 400, "metadata"),
            ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
            ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
            (
                {"output_expires_after": {"anchor": "now", "seconds": 3600}},
                400,
                "output_expires_after.anchor",
            ),
            (
                {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
                400,
                "output_expires_after.seconds",
            ),
        ):
            got, answer = await call(cluster, "POST", "/v1/batches", json={**good, **change})
            assert (got, answer["error"]["param"]) == (status, param), answer
        for method, path in (("GET", ""), ("POST", "/cancel")):
            got, answer = await call(cluster, method, f"/v1/batches/batch_none{path}")
            assert (got, answer["error"]["param"]) == (404, "batch_id")


async def test_results_expire_after_their_own_time(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path) as cluster:
        expiry = {"anchor": "created_at", "seconds": 4000}
        batch = await create(cluster, prompts(1), output_expires_after=expiry)
        batch = await batch_over(cluster, batch["id"])
        _, file = await call(cluster, "GET", f"/v1/files/{batch['output_file_id']}")
        assert file["expires_at"] - file["created_at"] == 4000


async def test_batches_are_listed_in_pages(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, roles=()) as cluster:
        made = [(await create(cluster, b"x"))["id"] for _ in range(3)][::-1]
        status, page = await call(cluster, "GET", "/v1/batches?limit=2")
        assert (status, [batch["id"] for batch in page["data"]]) == (200, made[:2])
        assert (page["object"], page["first_id"], page["last_id"]) == ("list", made[0], made[1])
        assert page["has_more"] is True
        _, page = await call(cluster, "GET", f"/v1/batches?after={made[1]}")
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == (made[2:], False)
        status, answer = await call(cluster, "GET", "/v1/batches?limit=101")
        assert (status, answer["error"]["param"]) == (400, "limit")


async def test_open_batches_are_bounded_and_a_key_has_a_share(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"batches_max_open": 4, "files_key_share": 0.5}
    async with filing_cluster(tmp_path, STUCK, api_keys="a,b,c", **bounds) as cluster:
        for name in ("a", "a", "b"):
            await create(cluster, prompts(1), headers=key(name))
        file_id = await upload(cluster, prompts(1), key("a"))
        body = {"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}
        status, answer = await call(cluster, "POST", "/v1/batches", key("a"), json=body)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert "batches_max_open" in answer["error"]["message"]
        await create(cluster, prompts(1), headers=key("c"))
        file_id = await upload(cluster, prompts(1), key("b"))
        body["input_file_id"] = file_id
        assert (await call(cluster, "POST", "/v1/batches", key("b"), json=body))[0] == 429


async def test_a_key_neither_sees_nor_cancels_the_batch_of_another(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, api_keys="a,b") as cluster:
        batch = await create(cluster, prompts(2), headers=key("a"))
        for method, path in (("GET", ""), ("POST", "/cancel")):
            status, answer = await call(cluster, method, f"/v1/batches/{batch['id']}{path}", key("b"))
            assert (status, answer["error"]["param"]) == (404, "batch_id")
        assert (await call(cluster, "GET", "/v1/batches", key("b")))[1]["data"] == []
        batch = await batch_over(cluster, batch["id"], key("a"))
        assert batch["status"] == "completed"
        status, _ = await call(cluster, "GET", f"/v1/files/{batch['output_file_id']}/content", key("b"))
        assert status == 404
        assert len(await lines_of(cluster, batch["output_file_id"], key("a"))) == 2


async def test_cancel_stops_running_requests_and_keeps_results(tmp_path: Path) -> None:
    num_begun = 0

    def script(_: pb.Task) -> Script:
        nonlocal num_begun
        num_begun += 1
        return ABC if num_begun <= 2 else STUCK

    async with filing_cluster(tmp_path, script, batches_max_concurrency=2) as cluster:
        batch = await create(cluster, prompts(10))
        await batch_when(cluster, batch["id"], lambda batch: batch["request_counts"]["completed"] == 2)
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
        status, answer = await call(cluster, "POST", f"/v1/batches/{batch['id']}/cancel")
        assert (status, answer["status"]) == (200, "cancelling")
        batch = await batch_over(cluster, batch["id"])
        assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
        assert batch["request_counts"] == {"total": 10, "completed": 2, "failed": 0}
        assert None not in (batch["cancelling_at"], batch["cancelled_at"])
        names = {line["custom_id"] for line in await lines_of(cluster, batch["output_file_id"])}
        assert names == {"r0", "r1"}
        await cluster.until(lambda state: not any(state["requests"].values()))
        assert num_begun == 4
        status, answer = await call(cluster, "POST", f"/v1/batches/{batch['id']}/cancel")
        assert (status, answer["error"]["message"]) == (400, "Cannot cancel a batch with status 'cancelled'.")


async def test_a_batch_that_is_cancelled_before_its_first_answer_has_no_files(tmp_path: Path) -> None:
    async with filing_cluster(tmp_path, STUCK) as cluster:
        batch = await create(cluster, prompts(1))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        await call(cluster, "POST", f"/v1/batches/{batch['id']}/cancel")
        batch = await batch_over(cluster, batch["id"])
        assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
        _, files = await call(cluster, "GET", "/v1/files")
        assert [file["id"] for file in files["data"]] == [batch["input_file_id"]]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "lock",
        f"{batch['id']}.json",
        *(f"{batch['input_file_id']}.{end}" for end in ("json", "data")),
    }


async def test_the_death_of_a_worker_is_survived_and_beyond_that_an_error_line(tmp_path: Path) -> None:
    def script(task: pb.Task) -> Script:
        if task.prompt_token_ids[0] == byte_ids(b"d")[0]:
            return Script(tokens=ABC.tokens, fail_at=1, error=WorkerLostError("the script's worker is lost"))
        return ABC

    content = jsonl(request_line("dies", prompt="d"), request_line("lives", prompt="x"))
    async with filing_cluster(tmp_path, script, max_replays=2) as cluster:
        batch, [lives], [dies] = await whole(cluster, content)
    assert (batch["status"], lives["custom_id"], dies["custom_id"]) == ("completed", "lives", "dies")
    assert dies["response"]["status_code"] == 503
    assert dies["response"]["body"]["error"]["code"] == "worker_lost"

    died = False

    def dying(_: pb.Task) -> Script:
        nonlocal died
        died, was_dead = True, died
        return ABC if was_dead else Script(tokens=ABC.tokens, die_at=1)

    async with filing_cluster(tmp_path, dying, (Role.AGGREGATED,), worker_wait_seconds=30) as cluster:
        batch = await create(cluster, prompts(1))
        await cluster.service.wait_for_workers(0)
        await cluster.add(Role.AGGREGATED, "both-1")
        batch = await batch_over(cluster, batch["id"])
        [line] = await lines_of(cluster, batch["output_file_id"])
    assert line["response"]["body"]["choices"][0]["text"] == "abc"
