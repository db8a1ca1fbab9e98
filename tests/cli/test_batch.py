"""``kvbaton batch`` (A23): its files, its retries, its state after a stop."""

import asyncio
import codecs
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from cli.batch import retry_after_seconds
from contract.identity import Role
from protos import worker_pb2
from tests.chaos.settings import process_environment
from tests.cli.batch_service import BatchService, Reply, running_batch_service
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, byte_ids

WAIT_SECONDS = 60


@pytest.fixture
async def service() -> AsyncIterator[BatchService]:
    async with running_batch_service() as running:
        yield running


def line(custom_id: str, prompt: str = "hi", **others: Any) -> str:
    asked = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
    return json.dumps(asked | others)


class Files:
    """The two files of a batch."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def ask(self, *lines: str) -> None:
        self.input.write_text("\n".join(lines) + "\n")

    def results(self) -> list[dict[str, Any]]:
        """Return the lines of the output; the file ends with a complete one."""
        text = self.output.read_text()
        assert text.endswith("\n")
        return [json.loads(one) for one in text.splitlines()]

    def by_id(self) -> dict[Any, dict[str, Any]]:
        found = self.results()
        assert len({one["custom_id"] for one in found}) == len(found)
        return {one["custom_id"]: one for one in found}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def started(files: Files, url: str, *flags: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "batch", "-i", str(files.input), "-o", str(files.output)),
        *("--url", url, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**process_environment(), **environment},
    )


async def run(files: Files, url: str, *flags: str, **environment: str) -> tuple[int | None, str]:
    """Run one batch; return its exit code and standard error."""
    process = await started(files, url, *flags, **environment)
    output, errors = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
    assert output == b""
    return process.returncode, errors.decode()


async def test_a_line_is_answered_as_http_answers_its_body(files: Files) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
    async with running_cluster(Script(tokens=[*byte_ids(b"yes"), END])) as cluster:
        files.ask(
            line("text"),
            line("chat", url="/v1/chat/completions", body=chat),
            line("bad", body={"prompt": "hi", "n": -1}),
        )
        code, errors = await run(files, cluster.url(""))
        _, direct = await cluster.post("/v1/chat/completions", chat)
    assert (code, errors.splitlines()) == (
        1,
        [
            "kvbaton: 3 lines: 2 answered now, 0 earlier, 1 failed",
            f"kvbaton: 1 of 3 lines have no answer; see {files.output} for the reasons",
        ],
    )
    found = files.by_id()
    assert found.keys() == {"text", "chat", "bad"}
    assert all(one.keys() == {"id", "custom_id", "response", "error"} for one in found.values())
    answer = found["chat"]["response"]
    assert answer["status_code"] == 200
    assert answer["request_id"] == answer["body"]["id"]
    assert answer["body"]["choices"] == direct["choices"]
    assert found["text"]["response"]["body"]["choices"][0]["text"] == "yes"
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "n"


async def test_embeddings_and_responses_are_served_in_batches(files: Files) -> None:
    """They get the answers and errors of HTTP, and are not sent again once answered."""
    embedding, response = {"input": ["ab", "c"]}, {"input": "hi", "max_output_tokens": 9}
    async with running_cluster(Script(tokens=[*byte_ids(b"yes"), END])) as cluster:
        files.ask(
            line("embedding", url="/v1/embeddings", body=embedding),
            line("bad embedding", url="/v1/embeddings", body={"input": []}),
            line("response", url="/v1/responses", body=response),
            line("streamed", url="/v1/responses", body={**response, "stream": True}),
        )
        code, errors = await run(files, cluster.url(""))
        _, direct = await cluster.post("/v1/embeddings", embedding)
        assert (code, errors.splitlines()[0]) == (
            1,
            "kvbaton: 4 lines: 2 answered now, 0 earlier, 2 failed",
        )
        found = files.by_id()
        assert found["embedding"]["response"]["body"] == direct
        answer = found["response"]["response"]
        assert answer["body"]["output"][0]["content"][0]["text"] == "yes"
        assert answer["request_id"] == answer["body"]["id"]
        assert found["bad embedding"]["response"]["status_code"] == 400
        assert found["bad embedding"]["response"]["body"]["error"]["param"] == "input"
        assert found["streamed"]["error"]["message"] == (
            "line 4: body.stream is true; a batch returns complete answers only"
        )
        num_embeds = len(cluster.workers["prefill-0"].received.embeds)
        code, errors = await run(files, cluster.url(""))
        assert (code, errors.splitlines()[0]) == (
            1,
            "kvbaton: 4 lines: 0 answered now, 2 earlier, 2 failed",
        )
        assert len(cluster.workers["prefill-0"].received.embeds) == num_embeds


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_every_kind_of_line_is_retried_while_the_service_is_busy(
    files: Files, service: BatchService, path: str
) -> None:
    at_once = {"Retry-After": "0"}
    service.replies = [Reply(0), Reply(429, "{}", at_once), Reply(503, "{}", at_once)]
    files.ask(line("a", url=path, body={"input": "hi"}))
    assert (await run(files, service.url))[0] == 0
    assert service.asked == [{"input": "hi"}] * 4


async def test_bad_lines_are_reported_with_their_number_and_the_others_answered(
    files: Files, service: BatchService
) -> None:
    files.ask(
        line("first"),
        "no json",
        "",
        '{"custom_id": "half"',
        line("get", method="GET"),
        line("where", url="/v1/models"),
        line("streamed", body={"prompt": "x", "stream": True}),
        line("list", body=[]),
        '{"method": "POST", "url": "/v1/completions", "body": {}}',
        line("first"),
        line("last"),
    )
    code, _ = await run(files, service.url)
    assert code == 1
    found = files.results()
    assert {one["custom_id"] for one in found if one["response"]} == {"first", "last"}
    problems = {one["error"]["line"]: (one["custom_id"], one["error"]) for one in found if one["error"]}
    assert {number: name for number, (name, _) in problems.items()} == {
        2: None,
        4: None,
        5: "get",
        6: "where",
        7: "streamed",
        8: "list",
        9: None,
        10: "first",
    }
    assert all(error["code"] == "invalid_line" for _, error in problems.values())
    assert problems[5][1]["message"] == "line 5: method is 'GET'; it must be 'POST'"
    assert problems[6][1]["message"] == (
        "line 6: url is '/v1/models'; it must be one of "
        "/v1/chat/completions, /v1/completions, /v1/embeddings, /v1/responses"
    )
    assert problems[10][1]["message"] == "line 10: custom_id is also that of line 1"


async def test_a_body_is_sent_unchanged(files: Files, service: BatchService) -> None:
    body = '{"prompt": "\\u00e9 \\ud83d\\ude00", "seed": 12345678901234567890, "x": 1.0e2}'
    files.ask('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ' + body + "}")
    assert (await run(files, service.url))[0] == 0
    assert service.raw == [body.encode()]


async def test_a_file_with_windows_line_ends_is_read(files: Files, service: BatchService) -> None:
    files.input.write_bytes(codecs.BOM_UTF8 + f"{line('a')}\r\n\r\n{line('b')}".encode())
    assert (await run(files, service.url))[0] == 0
    assert files.by_id().keys() == {"a", "b"}


async def test_a_terminal_shows_a_progress_bar(files: Files, service: BatchService) -> None:
    files.ask(*(line(str(number)) for number in range(3)))
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli.main", "batch", "-i", str(files.input), "-o", str(files.output)),
        *("--url", service.url),
        stderr=slave,
        env={**process_environment(), "TERM": "xterm"},
    )
    os.close(slave)
    code = await asyncio.wait_for(process.wait(), WAIT_SECONDS)
    with os.fdopen(master, "rb", buffering=0) as screen:
        seen = await asyncio.to_thread(screen.read, 65536)
    assert code == 0
    assert seen is not None
    assert b"Requests" in seen
    assert b"3/3" in seen


async def test_an_answered_line_is_not_sent_again(files: Files, service: BatchService) -> None:
    files.ask(line("a", "1"), line("b", "2"), line("c", "3"))
    service.replies = [Reply(), Reply(500, '{"error": {"message": "broken"}}'), Reply()]
    code, _ = await run(files, service.url, "--max-concurrency", "1")
    before = files.by_id()
    assert (code, before["b"]["response"]["status_code"]) == (1, 500)
    service.asked.clear()
    code, errors = await run(files, service.url)
    assert (code, service.asked) == (0, [{"prompt": "2"}])
    assert "3 lines: 1 answered now, 2 earlier, 0 failed" in errors
    after = files.by_id()
    assert (after["a"], after["c"]) == (before["a"], before["c"])
    assert after["b"]["response"]["status_code"] == 200


@pytest.mark.parametrize("kept", [1, 40, -1])
async def test_a_half_written_line_is_repaired(files: Files, service: BatchService, kept: int) -> None:
    files.ask(line("a", "1"), line("b", "2"))
    await run(files, service.url, "--max-concurrency", "1")
    first, last, _ = files.output.read_text().split("\n")
    files.output.write_text(f"{first}\n{last[:kept]}")
    service.asked.clear()
    assert (await run(files, service.url))[0] == 0
    assert service.asked == [{"prompt": "2"}]
    assert files.by_id().keys() == {"a", "b"}


async def test_a_last_line_without_its_end_is_an_answer(files: Files, service: BatchService) -> None:
    files.ask(line("a", "1"), line("b", "2"))
    await run(files, service.url)
    whole = files.output.read_text()
    files.output.write_text(whole.removesuffix("\n"))
    service.asked.clear()
    assert (await run(files, service.url))[0] == 0
    assert (service.asked, files.output.read_text()) == ([], whole)


async def test_a_file_that_no_batch_wrote_is_left_alone(files: Files, service: BatchService) -> None:
    files.ask(line("a"))
    files.output.write_text("my notes\nof years\n")
    code, errors = await run(files, service.url)
    assert code == 2
    assert "out.jsonl is not an answer of a batch" in errors
    assert files.output.read_text() == "my notes\nof years\n"
    files.output.unlink()
    files.output.hardlink_to(files.input)
    assert (await run(files, service.url))[0] == 2
    assert service.asked == []


async def test_a_busy_service_is_retried_after_the_requested_pause(
    files: Files, service: BatchService
) -> None:
    at_once = {"Retry-After": "0"}
    service.replies = [Reply(0), Reply(429, "{}", at_once), Reply(503, "{}", at_once), Reply()]
    files.ask(line("a"))
    assert (await run(files, service.url))[0] == 0
    assert len(service.asked) == 4
    assert files.by_id()["a"]["response"]["request_id"] == "req-4"


async def test_the_last_reply_of_a_busy_service_is_the_answer(files: Files, service: BatchService) -> None:
    service.replies = [Reply(429, "{}", {"Retry-After": "0"})] * 3
    files.ask(line("a"))
    assert (await run(files, service.url, "--max-retries", "2"))[0] == 1
    assert len(service.asked) == 3
    assert files.by_id()["a"]["response"]["status_code"] == 429


async def test_a_lost_service_ends_the_batch_and_keeps_its_answers(
    files: Files, service: BatchService
) -> None:
    service.replies = [Reply(), Reply(0)]
    files.ask(line("a"), line("b"), line("c"))
    code, errors = await run(files, service.url, "--max-retries", "0", "--max-concurrency", "1")
    assert code == 1
    assert "no longer answers" in errors
    assert files.by_id().keys() == {"a"}


async def test_the_key_is_sent_and_the_concurrency_is_bounded(files: Files, service: BatchService) -> None:
    files.ask(*(line(str(number)) for number in range(20)))
    code, errors = await run(
        files, service.url, "--max-concurrency", "3", KVBATON_API_KEY="the key", KVBATON_LOG_LEVEL="debug"
    )
    assert code == 0
    assert "the key" not in errors
    assert service.keys == ["Bearer the key"] * 20
    assert service.max_at_once <= 3


async def test_an_answer_that_is_not_json_becomes_a_string(files: Files, service: BatchService) -> None:
    service.replies = [Reply(502, "<html>\nBad gateway"), Reply(200, '{\n  "pretty": [1,\n 2]\n}')]
    files.ask(line("a"), line("b"))
    assert (await run(files, service.url, "--max-concurrency", "1"))[0] == 1
    found = files.by_id()
    assert found["a"]["response"]["body"] == "<html>\nBad gateway"
    assert found["b"]["response"]["body"] == {"pretty": [1, 2]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_batch_stopped_by_a_signal_is_continued_by_the_same_command(
    files: Files, number: int
) -> None:
    def stalling(task: worker_pb2.Task) -> Script:
        is_last = task.prompt_token_ids[-1] == byte_ids(b"z")[0]
        return Script(tokens=[*byte_ids(b"yes"), END], stall_at=1 if is_last else None)

    async with running_cluster(stalling, roles=(Role.AGGREGATED,)) as cluster:
        files.ask(line("a", "a"), line("b", "b"), line("z", "z"))
        process = await started(files, cluster.url(""))
        await cluster.until(lambda _: files.output.exists() and files.output.read_text().count("\n") == 2)
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        process.send_signal(number)
        _, errors = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
        assert process.returncode == 128 + number
        told = "stopped. 3 lines: 2 answered now, 0 earlier; run the same command again to continue"
        assert errors.decode() == f"kvbaton: {told}\n"
        assert files.by_id().keys() == {"a", "b"}
        await cluster.until(lambda state: not any(state["requests"].values()))
        cluster.script = lambda _: Script(tokens=[*byte_ids(b"yes"), END])
        assert (await run(files, cluster.url("")))[0] == 0
        assert len(cluster.workers["both-0"].received.decodes) == 4
    assert files.by_id().keys() == {"a", "b", "z"}


async def test_files_that_cannot_be_used_are_named(files: Files, service: BatchService) -> None:
    code, errors = await run(files, service.url)
    assert (code, "input" in errors, "No such file" in errors) == (2, True, True)
    files.ask(line("a"))
    files.output = files.output.parent / "nowhere" / "out.jsonl"
    code, errors = await run(files, service.url)
    assert (code, "output" in errors, "No such file" in errors) == (2, True, True)
    files.input.write_text("")
    files.output = files.input.with_name("out.jsonl")
    assert (await run(files, service.url))[0] == 0


def test_the_pause_is_seconds_or_a_date_and_a_minute_at_most() -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    past = format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)
    asked = ["3", "0", "86400", soon, past, "", "whenever", "-1"]
    pauses = [retry_after_seconds({"Retry-After": value}, 7.0) for value in asked]
    assert pauses == [3.0, 0.0, 60.0, 60.0, 0.0, 7.0, 7.0, 7.0]
    assert retry_after_seconds({}, 7.0) == 7.0
