"""``AsyncLLM``: the answers of ``Engine``, from an engine process that several clients use at once."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InvalidRequestError, SettingError, UnavailableError
from kvbaton import AsyncLLM, Engine, RequestOutput, SamplingParams
from tests.offline.test_llm import PARAMS, PROMPTS, told

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shared_engine.py"
SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_bytes": 64 * 2**20}


async def last_of(llm: AsyncLLM, prompt: str, params: Mapping[str, Any]) -> RequestOutput:
    """Return the complete answer, after checking that each one before it is its beginning."""
    text = ""
    async for output in llm.generate(prompt, SamplingParams(**params)):
        assert output.outputs[0].text.startswith(text)
        text = output.outputs[0].text
    assert output.finished
    return output


@pytest.fixture(scope="module")
def expected() -> list[tuple[Any, ...]]:
    """The answers of an engine in this process: each prompt with all parameters."""
    with Engine(**SMALL) as engine:
        for name, params in PARAMS.items():
            for number, prompt in enumerate(PROMPTS):
                engine.add_request(f"{name}/{number}", prompt, SamplingParams(**params))
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
    return told([last[f"{name}/{number}"] for name in PARAMS for number in range(len(PROMPTS))])


@pytest.mark.slow
async def test_clients_of_one_engine_have_the_answers_of_an_engine_alone(
    expected: list[tuple[Any, ...]],
) -> None:
    """B7: two clients send the same requests under the same names, all at once."""
    async with (
        await AsyncLLM.start(**SMALL) as owner,
        await AsyncLLM.attach(await owner.share()) as guest,
    ):
        each = [(prompt, params) for params in PARAMS.values() for prompt in PROMPTS]
        answers = await asyncio.gather(*(last_of(llm, *one) for llm in (owner, guest) for one in each))
        assert told(answers[: len(each)]) == expected
        assert told(answers[len(each) :]) == expected
        with pytest.raises(InvalidRequestError, match=r"request odd: "):
            await anext(guest.generate("Once", SamplingParams(temperature=-1), "odd"))
        with pytest.raises(InvalidRequestError, match="must be a text"):
            await anext(guest.generate("Once", None, ""))
        with pytest.raises(InvalidRequestError, match="only the client that started the engine"):
            await guest.share()
        stream: Any = guest.generate("Once", SamplingParams(max_tokens=None, ignore_eos=True), "left")
        assert (await anext(stream)).request_id == "left"
        await stream.aclose()
        await owner._client.until_free()
        await guest.shutdown()
        with pytest.raises(UnavailableError, match="has left"):
            await last_of(guest, "Once", {})
        assert told([await last_of(owner, *each[0])]) == expected[:1]


@pytest.mark.slow
def test_the_example_prints_the_answers_of_both_processes(
    expected: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setenv(f"KVBATON_{name.upper()}", str(value))
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    printed = run.stdout.splitlines()
    assert [line.partition(" → ")[0] for line in printed] == [
        repr(prompt) for prompt in ("The old moose", "The lake is", "lamp: fox\ncomet: ginger\n", "Once")
    ]
    _, greedy_text, *_ = expected[PROMPTS.index("Once")]
    assert printed[-1].partition(" → ")[2] == repr(greedy_text)


async def test_wrong_arguments_start_nothing(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="an AsyncLLM has no setting prefill"):
        await AsyncLLM.start(prefill=1)
    with pytest.raises(SettingError, match="an AsyncLLM has no setting data_parallel_size"):
        await AsyncLLM.start(data_parallel_size=2)
    with pytest.raises(UnavailableError, match="no engine is shared at"):
        await AsyncLLM.attach(str(tmp_path))
