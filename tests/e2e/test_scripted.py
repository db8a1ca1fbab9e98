"""Tool calls, reasoning, characters and stop strings through whole services: clients see the parser's whole-text result."""

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from contract.identity import Role
from kv_transfer.options import TransportName
from tests.e2e.in_process import running_in_process
from tests.e2e.midway import kill_midway
from tests.e2e.scripted_cells import (
    STOPS,
    ask_streamed,
    ask_whole,
    characters_and_stops,
    corpus_of,
    expected,
    long_cells_of,
    sent_back,
    tools_and_reasoning_of,
)
from tests.scripted_checkpoint import FORMATS, make_scripted_checkpoint
from tests.service import counter, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

FORMS: dict[str, tuple[list[Role], TransportName]] = {
    "aggregated": ([Role.AGGREGATED], "auto"),
    "shm": ([Role.PREFILL, Role.DECODE], "shm"),
    "tcp": ([Role.PREFILL, Role.DECODE, Role.DECODE], "tcp"),
}
MORTAL: dict[str, tuple[list[Role], TransportName]] = {
    "hermes": ([Role.PREFILL, Role.DECODE, Role.DECODE], "tcp"),
    "qwen": ([Role.PREFILL, Role.DECODE, Role.DECODE], "shm"),
    "llama3": ([Role.PREFILL, Role.DECODE, Role.DECODE], "shm"),
    "mistral": ([Role.AGGREGATED, Role.AGGREGATED], "auto"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FORMATS)
async def test_calls_and_reasoning_whole_and_streamed(family: str, form: str, tmp_path: Path) -> None:
    model = make_scripted_checkpoint(tmp_path / "model", family)
    cells = tools_and_reasoning_of(family)
    answers = expected(cells, model)
    async with running_in_process(tmp_path, model, *FORMS[form]) as service:
        assert await ask_whole(service.http, cells) == answers
        assert await ask_streamed(service.http, cells) == answers
    (seen,) = answers["text and calls"]
    assert (seen.content, seen.finish_reason, len(seen.calls)) == ("Let me see.", "tool_calls", 2)
    (thoughtful,) = answers["reasoning and calls"]
    assert (thoughtful.reasoning, thoughtful.calls) == ("Hm, 世界…", seen.calls)


@pytest.mark.parametrize("form", FORMS)
async def test_characters_cut_at_every_token_and_stop_strings(form: str, tmp_path: Path) -> None:
    model = make_scripted_checkpoint(tmp_path / "model")
    cells = characters_and_stops()
    answers = expected(cells, model)
    async with running_in_process(tmp_path, model, *FORMS[form]) as service:
        assert await ask_whole(service.http, cells) == answers
        assert await ask_streamed(service.http, cells) == answers
    assert {seen.stop_reason for (seen,) in answers.values()} == {None, *STOPS}


@pytest.mark.parametrize("family", FORMATS)
async def test_answers_of_the_model_can_be_sent_back_as_history(family: str, tmp_path: Path) -> None:
    """F10: the service used to reject its own answers as history, truncated calls among them."""
    model = make_scripted_checkpoint(tmp_path / "model", family)
    cells = tools_and_reasoning_of(family) | {
        f"cut {number}": replace(cell, fields={"max_tokens": 20 + 9 * number})
        for number, cell in enumerate(list(corpus_of(family).values())[::10])
    }
    async with running_in_process(tmp_path, model, *FORMS["shm"]) as service:
        for name, cell in cells.items():
            assert await sent_back(service.http, cell) == [200, 200, 200], name


@pytest.mark.parametrize("family", FORMATS)
async def test_all_test_cases_of_the_parsers_through_a_hand_over(family: str, tmp_path: Path) -> None:
    model = make_scripted_checkpoint(tmp_path / "model", family)
    cells = corpus_of(family)
    async with running_in_process(tmp_path, model, *FORMS["shm"]) as service:
        assert await ask_streamed(service.http, cells) == expected(cells, model)


@pytest.mark.parametrize("family", MORTAL)
async def test_a_worker_is_lost_in_the_middle(family: str, tmp_path: Path) -> None:
    model = make_scripted_checkpoint(tmp_path / "model", family)
    cells = long_cells_of(family)
    async with running_in_process(tmp_path, model, *MORTAL[family]) as service:
        ask = partial(ask_streamed, service.http, cells)

        async def kill() -> None:
            victim = service.busiest_decoder()
            assert victim.worker.num_requests
            victim.die()

        assert await kill_midway(len(cells), ask, kill) == expected(cells, model)


async def test_a_decode_worker_is_killed_in_the_middle(tmp_path: Path) -> None:
    """Like the test above, with processes and SIGKILL."""
    model = make_scripted_checkpoint(tmp_path / "model")
    cells = long_cells_of("hermes")
    flags = ("--prefill", "1", "--decode", "2", "--transport", "tcp", "--num-threads", "1")
    async with running_service(tmp_path, "--model", str(model), *flags) as service:
        ask = partial(ask_streamed, service.http, cells)

        async def kill() -> None:
            os.kill(await service.busiest_decoder(), signal.SIGKILL)

        assert await kill_midway(len(cells), ask, kill) == expected(cells, model)
        assert counter(await service.metrics("router"), "kvbaton_request_replays_total") > 0
