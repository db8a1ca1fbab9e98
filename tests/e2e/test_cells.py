"""Every feature of the API in every form of service: the same answers, also after a worker is killed."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cells import (
    CELLS,
    STREAMED,
    ask_embeddings,
    ask_streamed,
    ask_whole,
    masked,
    whole_choices,
)
from tests.e2e.midway import kill_midway
from tests.service import Service, counter, running_service

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 5e-4
"""For log probabilities in float32: another batch changes the most sensitive one of 10,000 by 2e-4, even without faults."""
FORMS = {
    "aggregated": ("--both", "1"),
    "shm": ("--prefill", "1", "--decode", "1", "--transport", "shm"),
    "tcp": ("--prefill", "1", "--decode", "2", "--transport", "tcp"),
}


async def test_every_feature_answers_equally_in_every_form_and_after_a_worker_is_killed(
    tmp_path: Path,
) -> None:
    """Whole responses are equal except id, time and cached tokens (log probabilities to 5e-4); streams likewise."""
    whole: dict[str, dict[str, Any]] = {}
    embedded: dict[str, dict[str, Any]] = {}
    for form, arguments in FORMS.items():
        folder = tmp_path / form
        folder.mkdir()
        async with running_service(folder, "--num-threads", "1", "--dtype", "float32", *arguments) as service:
            whole[form] = await ask_whole(service)
            check_same(whole[form], whole["aggregated"], form)
            embedded[form] = await ask_embeddings(service)
            check_same(embedded[form], embedded["aggregated"], form)
            expected = {name: whole_choices(whole[form][name]) for name in STREAMED}
            check_same(await ask_streamed(service), expected, f"{form}, streamed")
            if form == "tcp":
                check_same(await ask_while_a_worker_dies(service), expected, "after a death")
    check_that_the_cells_use_their_features(whole["aggregated"])
    assert len({str(one["embedding"]) for one in embedded["aggregated"]["embeddings"]}) == 3


def check_same(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Compare the cells; a failure names the cell."""
    assert found.keys() == expected.keys()
    for name in found:
        fractions: tuple[list[float], list[float]] = ([], [])
        assert masked(found[name], fractions[0]) == masked(expected[name], fractions[1]), f"{name}, {where}"
        assert fractions[0] == pytest.approx(fractions[1], abs=TOLERANCE), f"{name}, {where}"


async def ask_while_a_worker_dies(service: Service) -> dict[str, Any]:
    """Stream all cells and kill the decode worker with the most requests in the middle of them."""

    async def kill() -> None:
        os.kill(await service.busiest_decoder(), signal.SIGKILL)

    answers = await kill_midway(len(STREAMED), partial(ask_streamed, service), kill)
    assert counter(await service.metrics("router"), "kvbaton_request_replays_total") > 0
    return answers


def check_that_the_cells_use_their_features(answers: dict[str, Any]) -> None:
    """Check that each cell uses its feature; otherwise equal answers would prove nothing."""
    assert answers.keys() == CELLS.keys()
    choices = {name: answer["choices"] for name, answer in answers.items()}
    assert len({choice["text"] for choice in choices["n"]}) == 3
    assert len({choice["text"] for choice in choices["best_of"]}) == 2
    assert choices["stop"][0]["stop_reason"] in ("e ", ".", "k\n")
    assert choices["regex"][0]["text"][-4:].isdigit()
    assert "text" in choices["json_schema"][0]["message"]["content"]
    called = {
        name: {call["name"] for call in choices[name][0]["message"]["tool_calls"]}
        for name in ("required", "named")
    }
    assert called["named"] == {"erase"}
    assert called["required"] and called["required"] <= {"write", "erase"}
    assert choices["logprobs"][0]["logprobs"]["tokens"]
    assert choices["echo"][1]["text"].startswith("The old moose sat near")
    assert choices["echo"][1]["logprobs"]["token_logprobs"][1] < 0
    assert 69 not in choices["logit_bias"][0]["token_ids"]
    assert len(choices["min_tokens"][0]["token_ids"]) >= 80
