"""``Engine``: requests that are queued, steps that its caller makes, and the answers of ``LLM``."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.errors import InvalidRequestError, SettingError, UnavailableError
from kvbaton import LLM, Engine, RequestOutput, SamplingParams
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy, replace_weights
from tests.offline.test_llm import PARAMS, PROMPTS, told

SMALL: dict[str, Any] = {"num_threads": 1, "kv_cache_bytes": 64 * 2**20}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "offline.md"
LOOP = '''
def process_requests(engine: Engine, test_prompts: list[tuple[str, SamplingParams]]) -> None:
    """Continuously process a list of prompts and handle the outputs."""
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1

        request_outputs: list[RequestOutput] = engine.step()

        for request_output in request_outputs:
            if request_output.finished:
                print(request_output)
'''
"""The offline loop of seed 000."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with Engine(**SMALL) as running:
        yield running


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    """It has no requests, before and after the test."""
    assert not shared.has_unfinished_requests()
    yield shared
    assert not shared.has_unfinished_requests()


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step until all requests have finished; return the last output of each."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    assert all(output.finished for output in last.values())
    return last


def test_the_program_of_the_page_prints_each_answer_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A20: prompts fed one by one while steps run, until all have finished; the seed's loop, word by word."""
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (program,) = [one for one in programs if LOOP in one]
    exec(program.replace('Engine("demo"', 'Engine("demo", kv_cache_bytes=2**26'), {})
    printed = capsys.readouterr().out.splitlines()
    assert sorted(re.findall(r"RequestOutput\(request_id='(.)', prompt='(.*?)'", "\n".join(printed))) == [
        ("0", "A robot may not injure a human being"),
        ("1", "To be or not to be,"),
        ("2", "What is the meaning of life?"),
    ]
    assert len(printed) == 3 and all("finished=True" in line for line in printed)


def test_adding_only_enqueues_and_a_step_brings_one_token_of_each(engine: Engine) -> None:
    """A18, A19, A20: texts so far, of which each is the beginning of the next."""
    for index, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(index), prompt, GREEDY)
    before: dict[str, str] = {}
    for number in range(1, 7):
        assert engine.has_unfinished_requests()
        outputs = engine.step()
        assert sorted(output.request_id for output in outputs) == ["0", "1", "2"]
        for output in outputs:
            (answer,) = output.outputs
            assert len(answer.token_ids) == number
            assert answer.text.startswith(before.get(output.request_id, ""))
            assert output.finished == (number == 6)
            assert answer.finish_reason == ("length" if output.finished else None)
            assert output.metrics.end_to_end >= output.metrics.prefill > 0
            before[output.request_id] = answer.text
    assert engine.step() == []


def test_answers_depend_on_no_other_request(engine: Engine) -> None:
    """A20: requests come, and are aborted, between any two steps."""
    params = [SamplingParams(**PARAMS[name]) for name in ("greedy", "seeded", "several", "stop", "form")]
    alone = {}
    for number, one in enumerate(params):
        engine.add_request("alone", PROMPTS[number % 4], one)
        alone[number] = told([finish(engine)["alone"]])
    dice = random.Random(7)
    for _ in range(4):
        order = dice.sample(range(len(params)), len(params))
        last: dict[str, RequestOutput] = {}
        aborted = set()
        while order or engine.has_unfinished_requests():
            if order and dice.random() < 0.6:
                number = order.pop()
                engine.add_request(str(number), PROMPTS[number % 4], params[number])
                if dice.random() < 0.3:
                    aborted.add(number)
            for number in [one for one in aborted if dice.random() < 0.2]:
                aborted.remove(number)
                engine.abort_request(str(number))  # and again, under the same id
                if not last.get(str(number)) or not last[str(number)].finished:
                    engine.add_request(str(number), PROMPTS[number % 4], params[number])
            last |= {output.request_id: output for output in engine.step()}
        assert {int(name): told([output]) for name, output in last.items()} == alone


def test_reloaded_weights_answer_and_the_cache_of_the_former_ones_is_gone(tmp_path: Path) -> None:
    """B16: the golden text is that of the weights that the folder has now."""
    folder = make_checkpoint(tmp_path / "model", seed=1)
    prompt = [(7 * i + 3) % 256 for i in range(40)]
    answers = []
    with Engine(folder, dtype="float32", **SMALL) as engine:
        for seed in (2, 1, None):
            golden = reference_greedy(load_reference(folder), prompt, 6)
            for num_cached in (0, 32):
                engine.add_request("a", prompt, GREEDY)
                with pytest.raises(InvalidRequestError, match="request a has not finished"):
                    engine.reload_weights()
                (answer,) = finish(engine).values()
                assert answer.outputs[0].token_ids == golden
                assert answer.num_cached_tokens == num_cached
            answers.append(golden)
            if seed:
                replace_weights(folder, seed)
                engine.reload_weights()
    assert answers[0] == answers[2] != answers[1]
    with pytest.raises(UnavailableError):
        engine.reload_weights()


def test_another_model_is_not_loaded_in_the_place_of_the_old_one(tmp_path: Path) -> None:
    """B16: the engine answers as before, with its cache."""
    folder = make_checkpoint(tmp_path / "model", seed=1)
    prompt = [(7 * i + 3) % 256 for i in range(40)]
    with Engine(folder, dtype="float32", **SMALL) as engine:
        engine.add_request("a", prompt, GREEDY)
        golden = told(list(finish(engine).values()))
        replace_weights(folder, 2, num_hidden_layers=3)
        with pytest.raises(SettingError, match=r"num_hidden_layers of config.json was 2 .* and is 3"):
            engine.reload_weights()
        engine.add_request("a", prompt, GREEDY)
        (again,) = finish(engine).values()
        assert (told([again]), again.num_cached_tokens) == (golden, 32)


def test_an_aborted_request_gives_nothing_more(engine: Engine) -> None:
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.add_request("b", PROMPTS[1], GREEDY)
    assert len(engine.step()) == 2
    engine.abort_request("a")
    engine.abort_request("unknown")
    assert set(finish(engine)) == {"b"}
    engine.add_request("a", PROMPTS[0], GREEDY)
    (wanted,) = told([finish(engine)["a"]])
    engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.add_request("a", PROMPTS[0], GREEDY)
    assert told([finish(engine)["a"]]) == [wanted], "the end of the aborted one is not its end"
    engine.add_request("c", PROMPTS[0], GREEDY)
    engine.abort_request("c")
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (PROMPTS[0], {"temperature": 3}, r"temperature is 3"),
        (PROMPTS[0], {"stop": [""]}, "stop holds an empty string"),
        ([10**6], {}, "token id 1000000 is not in the vocabulary"),
        ([], {}, "the prompt is empty"),
        (7, {}, "prompt is 7; it must be a text or a list of token ids"),
        ({"prompt": "a", "x": 1}, {}, "it must have 'prompt' or 'prompt_token_ids'"),
        ("word " * 9000, {}, "maximum context length"),
        (PROMPTS[0], {"structured_outputs": {"nothing": 1}}, "structured_outputs"),
    ],
)
def test_bad_input_is_refused_at_once_and_names_the_request(
    engine: Engine, prompt: Any, params: dict[str, Any], message: str
) -> None:
    engine.add_request("good", PROMPTS[0], GREEDY)
    with pytest.raises(InvalidRequestError, match=f"^request bad: .*{message}"):
        engine.add_request("bad", prompt, SamplingParams(**params))
    with pytest.raises(InvalidRequestError, match="request good has not finished"):
        engine.add_request("good", PROMPTS[0], GREEDY)
    with pytest.raises(InvalidRequestError, match="request_id is 5; it must be a text"):
        engine.add_request(5, PROMPTS[0], GREEDY)  # type: ignore[arg-type]
    assert set(finish(engine)) == {"good"}


def test_a_request_that_fails_in_a_step_ends_alone(engine: Engine) -> None:
    """Its error is raised once; the others, and what they had in the same step, go on."""
    bad = SamplingParams(structured_outputs={"grammar": "root ::= nothing"})
    engine.add_request("bad", PROMPTS[0], bad)
    engine.add_request("good", PROMPTS[0], GREEDY)
    errors = []
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        try:
            last |= {output.request_id: output for output in engine.step()}
        except InvalidRequestError as error:
            errors.append(error.message)
    assert len(errors) == 1 and errors[0].startswith("request bad: ")
    assert set(last) == {"good"} and last["good"].finished


def test_a_closed_engine_says_so_and_leaves_no_process() -> None:
    others = set(psutil.Process().children(recursive=True))
    engine = Engine(**SMALL)
    engine.add_request("a", PROMPTS[0])
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("b", PROMPTS[0])):
        with pytest.raises(UnavailableError, match="this Engine is closed"):
            call()
    assert set(psutil.Process().children(recursive=True)) <= others


def test_a_bad_setting_is_named() -> None:
    with pytest.raises(SettingError, match="an Engine has no setting prefill; it has"):
        Engine(prefill=1)
    with pytest.raises(SettingError, match=r"max_model_len is '1'.*at least 2"):
        Engine(max_model_len=1)
    with pytest.raises(SettingError, match="neither an existing folder"):
        Engine("/no/such/model")


@pytest.mark.slow
@pytest.mark.e2e
def test_the_answers_are_those_of_llm() -> None:
    """A20, A22: at temperature 0, with seeds, several answers, stop strings and grammars."""
    with LLM(**SMALL) as llm:
        wanted = {name: llm.generate(PROMPTS, SamplingParams(**params)) for name, params in PARAMS.items()}
        with pytest.raises(InvalidRequestError) as of_llm:
            llm.generate(PROMPTS[0], SamplingParams(temperature=3))
    with Engine(**SMALL) as engine:
        with pytest.raises(InvalidRequestError) as of_engine:
            engine.add_request("0", PROMPTS[0], SamplingParams(temperature=3))
        for name, params in PARAMS.items():
            for index, prompt in enumerate(PROMPTS):
                engine.add_request(f"{name} {index}", prompt, SamplingParams(**params))
        found = finish(engine)
    for name, outputs in wanted.items():
        mine = [found[f"{name} {index}"] for index in range(len(PROMPTS))]
        assert told(mine) == told(outputs), name
        for one, other in zip(mine, outputs, strict=True):
            assert (one.prompt, one.prompt_token_ids) == (other.prompt, other.prompt_token_ids)
            assert [each.logprobs is None for each in one.outputs] == [
                each.logprobs is None for each in other.outputs
            ]
    assert of_engine.value.message.removeprefix("request 0: ") == of_llm.value.message.removeprefix(
        "prompt 0: "
    )
    assert of_engine.value.param == of_llm.value.param
