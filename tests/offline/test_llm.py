"""``LLM`` with its real workers: the service's own answers, in order, and nothing left behind."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from contract.errors import InvalidRequestError, SettingError, UnavailableError
from kvbaton import LLM, PoolingParams, RequestOutput, SamplingParams
from launch.model import find_model
from tests.checkpoints import (
    load_reference,
    make_checkpoint,
    reference_greedy,
    write_checkpoint,
    write_modules,
)
from tests.families.tiny_models import make_tiny
from tests.offline import programs
from tests.service import running_service

PROMPTS = ["The old moose sat near", "lamp: fox\ncomet: ginger\nWhat is", "Once", "a b c d e f g h " * 20]
CHAT = [{"role": "user", "content": 'lamp: fox\ncomet: ginger\nWhat is "comet"?'}]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_tokens": 12},
    "penalties": {"temperature": 0, "max_tokens": 12, "repetition_penalty": 1.5, "logit_bias": {18: 5.0}},
    "several": {"temperature": 0.8, "seed": 3, "n": 3, "max_tokens": 8},
    "form": {"seed": 5, "max_tokens": 24, "structured_outputs": {"regex": "[a-z]{3,8} [0-9]{2,4}"}},
    "late": {"seed": 9, "max_tokens": 14, "min_tokens": 9, "presence_penalty": 1.5},
    "stop": {"temperature": 0, "max_tokens": 40, "stop": ["."], "logprobs": 2},
}


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_KV_CACHE_BYTES", str(64 * 2**20))


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1) as running:
        yield running


def told(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    """Return the parts that must not depend on the batching of the prompts."""
    return [
        (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason)
        for output in outputs
        for answer in output.outputs
    ]


def told_by_http(choices: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The same of the choices of a response."""
    return [
        (
            choice["token_ids"],
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            choice["stop_reason"],
        )
        for choice in choices
    ]


def wait_until_it_works(*workers: psutil.Process) -> None:
    """Block until idle workers have something to do."""
    began = time.monotonic()
    before = sum(worker.cpu_times().user for worker in workers)
    while sum(worker.cpu_times().user for worker in workers) == before:
        assert time.monotonic() < began + 30, "the worker has got nothing to do"
        time.sleep(0.001)


def as_json(params: dict[str, Any]) -> dict[str, Any]:
    """The fields of HTTP that ask for the same."""
    bias = {str(token): value for token, value in params.get("logit_bias", {}).items()}
    return {**params, **({"logit_bias": bias} if bias else {})}


@pytest.mark.slow
@pytest.mark.e2e
def test_embeddings_are_those_of_transformers() -> None:
    """Aggregated and from the prefill pool; a repeated prompt comes from the cache, and gives the same."""
    prompts: list[Any] = [*PROMPTS, [5, 6, 7]]
    bad: list[Any] = ["fine", [10**6]]
    all_pools: list[dict[str, Any]] = [{}, {"prefill": 1, "decode": 1}]
    for pools in all_pools:
        with LLM(num_threads=1, dtype="float32", max_num_batched_tokens=64, **pools) as llm:
            outputs = llm.embed(prompts)
            again = llm.embed(prompts[3])[0]
            assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=2))[0].finished
            with pytest.raises(InvalidRequestError, match="prompt 1: "):
                llm.embed(bad)
        model = load_reference(find_model("demo"))
        for output in outputs:
            states = model.model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0, -1]
            wanted = torch.nn.functional.normalize(states.detach(), dim=0)
            found = torch.tensor(output.outputs.embedding)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
        assert again.num_cached_tokens > 0
        first = torch.tensor(outputs[3].outputs.embedding)
        torch.testing.assert_close(torch.tensor(again.outputs.embedding), first, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.e2e
def test_an_embedding_model_gives_means_where_it_says_so_and_no_answers(tmp_path: Path) -> None:
    """A41: each request may ask for another kind of pooling."""
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=3, is_bare=True)
    write_modules(folder, "mean_tokens", "Normalize")
    prompt = [(37 * i + 11) % 256 for i in range(70)]
    with LLM(folder, num_threads=1, max_num_batched_tokens=32, prefill=1, decode=1) as llm:
        first, again = llm.embed(prompt), llm.embed(prompt)
        with pytest.raises(InvalidRequestError, match="embeddings only"):
            llm.generate(prompt)
        params = [PoolingParams("max", normalize=False), PoolingParams("last"), PoolingParams()]
        kinds = [output.outputs.embedding for output in llm.embed([prompt] * 3, params)]
        wrong: list[Any] = [PoolingParams("cls"), "max", params[:2]]  # type: ignore[arg-type]
        for each in wrong:
            with pytest.raises(InvalidRequestError, match="pooling_"):
                llm.embed([prompt] * 3, each)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = model(torch.tensor([prompt])).last_hidden_state[0].detach()
    wanted = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    exact = [states.amax(dim=0), torch.nn.functional.normalize(states[-1], dim=0), wanted]
    for embedding, one in zip(kinds, exact, strict=True):
        torch.testing.assert_close(torch.tensor(embedding), one, rtol=1e-3, atol=1e-4)
    for (output,) in (first, again):
        assert output.num_cached_tokens == 0
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.e2e
def test_states_of_recurrent_layers_are_handed_over(tmp_path: Path) -> None:
    """Workers of both roles serve a model with short convolutions."""
    folder = write_checkpoint(tmp_path, make_tiny("lfm2"), 3)
    prompts = [[(37 * i + 11) % 256 for i in range(length)] for length in (40, 1, 9)]
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with LLM(folder, num_threads=1, dtype="float32", max_num_batched_tokens=32, prefill=1, decode=1) as llm:
        answers = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling)]
    model = load_reference(folder)
    assert answers == [reference_greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.e2e
async def test_the_answers_are_those_of_the_service(tmp_path: Path) -> None:
    """A21, A22: offline aggregated, offline through the hand-over and over HTTP give the same, token by token."""
    answers: dict[str, list[Any]] = {}
    all_pools: list[dict[str, Any]] = [{}, {"prefill": 1, "decode": 1}]
    for pools in all_pools:
        with await asyncio.to_thread(LLM, num_threads=1, **pools) as llm:
            for name, params in PARAMS.items():
                found = await asyncio.to_thread(llm.generate, PROMPTS, SamplingParams(**params))
                found += await asyncio.to_thread(llm.chat, CHAT, SamplingParams(**params))
                answers.setdefault(name, []).append(told(found))
    async with running_service(tmp_path, "--num-threads", "1") as service:
        for name, params in PARAMS.items():
            body = {**as_json(params), "return_token_ids": True}
            status, whole = await service.post("/v1/completions", {"prompt": PROMPTS, **body})
            assert status == 200, whole
            chat_body = body | ({"logprobs": True, "top_logprobs": 2} if "logprobs" in body else {})
            status, chat = await service.post("/v1/chat/completions", {"messages": CHAT, **chat_body})
            assert status == 200, chat
            answers[name].append(told_by_http([*whole["choices"], *chat["choices"]]))
    for name, (aggregated, handed_over, http) in answers.items():
        assert aggregated == handed_over == http, name


@pytest.mark.slow
@pytest.mark.e2e
def test_a_worker_that_dies_is_a_pause(llm: LLM) -> None:
    """An answer is continued after its delivered tokens, like in the service."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = told(llm.generate(PROMPTS * 4, params))
    worker = next(child for child in psutil.Process().children() if "both" in child.cmdline())

    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(llm.generate, PROMPTS * 4, params)
        wait_until_it_works(worker)
        worker.kill()
        assert told(answer.result()) == expected


@pytest.mark.slow
@pytest.mark.e2e
def test_bad_input_costs_nothing_and_a_closed_llm_says_so(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: temperature is 3\.0"):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(temperature=3)])
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InvalidRequestError, match="priority has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], priority=[1])
    with pytest.raises(InvalidRequestError, match="lora_request is not supported"):
        llm.generate("a", lora_request="x")  # type: ignore[arg-type]
    answers = llm.generate(["a", "b"], SamplingParams(ignore_eos=True), priority=[1, 2])
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [16, 16]
    assert llm.generate([]) == []
    llm.close()
    llm.close()
    assert not any("both" in child.cmdline() for child in psutil.Process().children())
    with pytest.raises(UnavailableError, match="closed"):
        llm.generate("a")


@pytest.mark.slow
@pytest.mark.e2e
def test_an_llm_that_nobody_holds_any_more_is_closed() -> None:
    others = psutil.Process().children()
    llm = LLM(num_threads=1)
    # All but the process that renders chat templates, which all tests share.
    services = [
        one for one in psutil.Process().children() if one not in others and "cli.main" in one.cmdline()
    ]
    children = [each for one in services for each in (one, *one.children(recursive=True))]
    assert children
    del llm
    gc.collect()
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_a_bad_argument_is_named() -> None:
    with pytest.raises(SettingError, match=r"max_model_len is '1'.*at least 2"):
        LLM(max_model_len=1)
    with pytest.raises(SettingError, match="prefill is 1 but decode is not given"):
        LLM(prefill=1)
    with pytest.raises(SettingError, match="neither an existing folder"):
        LLM("/no/such/model")


def test_a_refused_model_is_refused_with_its_reason(tmp_path: Path) -> None:
    """Before a process is started, in the words of ``kvbaton check``."""
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "version": "gemv"}
    (folder / "config.json").write_text(json.dumps(config))
    others = psutil.Process().children()
    with pytest.raises(SettingError, match=r"quantization_config\.version is 'gemv'; only 'gemm' is served"):
        LLM(folder)
    assert psutil.Process().children() == others


def test_a_bad_setting_of_its_router_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBATON_MAX_BODY_BYTES", "1")
    with pytest.raises(SettingError, match=r"max_body_bytes is '1'.*at least 1024"):
        LLM()
    monkeypatch.delenv("KVBATON_MAX_BODY_BYTES")
    monkeypatch.setenv("KVBATON_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "settings.toml").write_text("[router]\nmax_replays = -1\n")
    with pytest.raises(SettingError, match=r"max_replays is '-1'.*at least 0"):
        LLM()
    (tmp_path / "settings.toml").write_text("[up]\nprefill = 1\n")
    with pytest.raises(SettingError, match="prefill is 1 but decode is not given"):
        LLM()


@pytest.mark.e2e
def test_a_model_that_cannot_be_served_is_an_error_before_a_process_starts(
    tmp_path: Path, demo_model: Path
) -> None:
    for file in demo_model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    others = psutil.Process().children()
    with pytest.raises(SettingError, match="has no weights"):
        LLM(tmp_path)
    assert set(psutil.Process().children()) <= set(others)


@contextmanager
def started(program: str) -> Iterator["subprocess.Popen[str]"]:
    """It is ended with the block, however that ends."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    found: dict[str, Any] = json.loads(line)
    return found


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.e2e
def test_a_program_that_never_closes_ends_and_leaves_nothing() -> None:
    with started(programs.NEVER_CLOSES) as process:
        said = line_of(process)
        output, errors = process.communicate(timeout=240)
        assert (process.returncode, output, errors) == (0, "", "")
        assert len(said["tokens"]) == 4
        assert said["children"]
        assert not any(is_alive(pid) for pid in said["children"])


@pytest.mark.slow
@pytest.mark.e2e
def test_ctrl_c_ends_the_question_and_not_the_llm() -> None:
    with started(programs.INTERRUPTED) as process:
        children = line_of(process)["children"]
        wait_until_it_works(*map(psutil.Process, children))
        os.kill(process.pid, signal.SIGINT)
        assert line_of(process) == {"interrupted": True}
        assert len(line_of(process)["tokens"]) == 4
        process.communicate(timeout=240)
        assert process.returncode == 0
        assert not any(is_alive(pid) for pid in children)


@pytest.mark.slow
@pytest.mark.e2e
def test_workers_die_with_a_program_that_is_killed() -> None:
    with started(programs.KILLED) as process:
        children = [psutil.Process(pid) for pid in line_of(process)["children"]]
        process.kill()
        process.communicate(timeout=240)
        assert psutil.wait_procs(children, timeout=30)[1] == []


def test_importing_kvbaton_is_cheap() -> None:
    """Neither torch nor what a router needs is loaded before a name is used."""
    code = (
        "import sys, kvbaton; print({'torch', 'grpc', 'aiohttp', 'pydantic', 'tokenizers'} & sys.modules.keys());"
        " from kvbaton import LLM, SamplingParams, RequestOutput; print('torch' in sys.modules, 'LLM' in dir(kvbaton))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "set()\nFalse True\n"
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from kvbaton import Nothing  # noqa: F401
