"""``kvbaton check``: its report about a model folder, and its exit codes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.check import Finding, add_devices, add_served
from cli.main import run_command
from contract.errors import SettingError
from engine.core import EngineCore
from engine.kv_cache.shares import HOST_LIMIT_BYTES
from engine.models.served import examine
from engine.settings import EngineSettings
from launch.arguments import parse
from launch.devices import RankCounts
from launch.machine_settings import UpSettings
from launch.model import check_model
from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint, make_foreign_checkpoint, write_checkpoint
from tests.families.tiny_models import make_tiny
from tests.text.tiny_model import model_files, write_model


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code and the printed text."""
    try:
        code = run_command(["check", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, capsys.readouterr().out


def folder_with(tmp_path: Path, template: str | None, **config: Any) -> Path:
    named: dict[str, Any] = {"eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    files = model_files(**config) | {
        "tokenizer_config.json": json.dumps(named).encode(),
        "a.safetensors": b"1234",
    }
    return write_model(tmp_path / "tiny", files)


GENERIC = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def test_a_good_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F4: the probe's report is printed, and the verdict of the engine."""
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16, max_position_embeddings=128)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "chat_template": CHAT_TEMPLATE})
    )
    code, text = checked(capsys, str(folder))
    assert code == 0, text
    lines = [line.split("  ") for line in text.splitlines()]
    found = {words[0]: words[-1].strip() for words in lines if len(words) > 1}
    assert (found["architecture"], found["dtype"]) == ("LlamaForCausalLM", "bfloat16")
    assert found["context length"] == "128"
    assert (found["served by"], found["KV bytes per token"]) == ("the own decoder", str(2 * 2 * 2 * 16 * 2))
    assert found["weights in memory"].endswith("GiB in bfloat16")
    assert "developer" in text and "as system" in text
    code, text = checked(capsys, "--json", str(folder))
    found_json = json.loads(text)
    assert (code, found_json["weights"], found_json["problems"]) == (0, 1, [])
    assert found_json["chat_templates"]["default"]["user"] == "text"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("Hello.", "does not show user messages"),
        ("{% if %}", "cannot be compiled"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "2 s of CPU time",
        ),
    ],
)
def test_problems_are_named(
    template: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = checked(capsys, str(folder_with(tmp_path, template)))
    assert code == 1
    assert words in text


def test_the_bytes_of_a_token_are_those_of_the_kvs_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D12: the number formats are settings, as they are of the start."""
    folder = make_checkpoint(tmp_path)
    code, text = checked(capsys, "--json", "--kv-cache-dtype", "bfloat16", str(folder))
    found = json.loads(text)
    assert (code, found["KV bytes per token"], found["KV dtype"]) == (0, 2 * 2 * 2 * 16 * 2, "bfloat16")
    assert found["weights in memory"].endswith("GiB in float32")
    code, text = checked(capsys, "--json", "--kv-cache-dtype", "float16", str(folder))
    assert code == 1
    assert json.loads(text)["problems"][0].startswith(
        "kv_cache_dtype is 'float16', and the model computes float32"
    )


def test_the_memory_of_each_group_of_layers_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer of 2 KV heads of 16 numbers in float32; the second one keeps 2 blocks of 16 tokens for a window of 6."""
    folder = make_foreign_checkpoint(tmp_path, "gemma3")
    of_layer = 2 * 2 * 16 * 4
    found = json.loads(checked(capsys, "--json", str(folder))[1])
    assert found["KV bytes per token"] == 2 * of_layer
    assert found["KV of layers"] == {
        "full": {"layers": 1, "bytes a token": of_layer},
        "window of 6 tokens": {"layers": 1, "bytes a token": of_layer},
    }
    held = {"bytes": (256 + 2 * 16) * of_layer, "bytes where all tokens are kept": 2 * 256 * of_layer}
    assert found["KV of a request"] == {"256 tokens": held}
    text = checked(capsys, str(folder))[1]
    assert "full: 1 layers, 256 bytes a token; window of 6 tokens: 1 layers, 256 bytes a token" in text
    assert "256 tokens: 73,728 bytes, 131,072 bytes where all tokens are kept" in text


def test_states_beside_the_kv_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of four are short convolutions; the others have 2 KV heads of 16 numbers in float32."""
    folder = write_checkpoint(tmp_path, make_tiny("lfm2"), 3)
    found = json.loads(checked(capsys, "--json", str(folder))[1])
    assert found["problems"] == []
    assert found["KV of layers"] == {"full": {"layers": 2, "bytes a token": 2 * 2 * 2 * 16 * 4}}
    # Of each convolution the last three inputs of 64 channels; a state begins at a multiple of 64 bytes.
    assert found["states of a request"] == {
        "conv": {"layers": 2, "bytes": 2 * 3 * 64 * 4},
        "slot": {"bytes": 2 * 3 * 64 * 4},
    }
    core = EngineCore(EngineSettings(model=folder, kv_cache_bytes=HOST_LIMIT_BYTES))
    assert found["requests at once in 1.00 GiB"] == core.info.num_state_slots
    core.close()
    text = checked(capsys, str(folder))[1]
    assert "conv: 2 layers, 1,536 bytes; slot: 1,536 bytes" in text


def test_a_folder_without_weights_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked(capsys, str(write_model(tmp_path / "tiny")))
    assert code == 1
    assert "no weights" in text


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<tool_call>' + name + '<arg_key>'", "glm"),
        ("<|start|>{{ role }}<|channel|>final<|message|>", "harmony"),
        ("<|tool_call_start|>[]<|tool_call_end|>", "pythonic"),
        ("no tools", "text"),
    ],
)
def test_the_format_of_calls_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, name: str
) -> None:
    _, text = checked(capsys, str(folder_with(tmp_path, f"{GENERIC}{{# {template} #}}")), "--json")
    assert json.loads(text)["calls are read as"] == name


def test_a_broken_tokenizer_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, GENERIC)
    (folder / "tokenizer.json").write_text("{}")
    code, text = checked(capsys, "--json", str(folder))
    assert code == 1
    assert "tokenizer" in json.loads(text)["problems"][0]


def test_a_path_that_is_not_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(capsys, str(tmp_path))[0] == 2
    assert checked(capsys, str(tmp_path / "none"))[0] == 2


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066"
UNSAFE = set(EVIL) - set("owned]0;[2J31m")


def test_a_folder_cannot_control_the_terminal_of_its_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever the text is: in fields, in names of tokens and of templates, in errors, and in the folder's own name."""
    folder = folder_with(
        tmp_path, GENERIC, architectures=[EVIL], torch_dtype=EVIL, quantization_config={"quant_method": EVIL}
    )
    named = {
        "eos_token": EVIL,
        "bos_token": f"a\nproblem: {EVIL}",
        "chat_template": [{"name": EVIL, "template": GENERIC}],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    evil = folder.rename(tmp_path / f"{EVIL}\n")
    for flags in ((), ("--json",)):
        _, text = checked(capsys, *flags, str(evil))
        assert "owned" in text
        assert not UNSAFE & set(text)
        faked = [line for line in text.splitlines() if line.startswith("problem: ") and "owned" in line]
        assert all(line.startswith(("problem: model", "problem: the model")) for line in faked)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "x.ckpt", "w.pkl", "w.pickle"]
)
def test_a_folder_whose_only_weights_are_a_pickle_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_with(tmp_path, GENERIC)
    (folder / "a.safetensors").rename(folder / name)
    code, text = checked(capsys, str(folder))
    assert (code, f"the only weights are pickles ({name})" in text) == (1, True)
    (folder / "a.safetensors").write_bytes(b"1234")
    assert "pickles" not in checked(capsys, str(folder))[1]


def test_a_refused_model_is_a_problem_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sentence is that of the loader, and the last line (the sampled forms are in test_served.py)."""
    folder = make_foreign_checkpoint(tmp_path, "olmo2")
    config = json.loads((folder / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(quantised))
    code, text = checked(capsys, str(folder))
    assert code == 1
    assert text.splitlines()[-1].endswith("quantization_config.bits is None; only 4 or 8 is served")
    (folder / "config.json").write_text(json.dumps(config))
    code, text = checked(capsys, "--json", str(folder))
    found = json.loads(text)
    assert (found["served by"], found["KV bytes per token"]) == ("transformers", 2 * 2 * 2 * 16 * 4)


def test_a_refused_model_ends_up_and_serve_before_a_process_starts(tmp_path: Path) -> None:
    """The last line of a start is the reason, in the words of check."""
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "version": "gemv"}
    (folder / "config.json").write_text(json.dumps(config))
    for words in (["serve", str(folder)], ["up", "--model", str(folder)]):
        ended = subprocess.run(
            [sys.executable, "-m", "cli.main", *words, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == 2
        assert "quantization_config.version is 'gemv'; only 'gemm' is served" in ended.stderr.splitlines()[-1]
        assert "started" not in ended.stderr


def test_a_family_that_was_never_tried_is_no_success(tmp_path: Path) -> None:
    """Exit 0 promises a start; such a model may be refused by the comparison of numbers there."""
    served = examine(make_foreign_checkpoint(tmp_path, "olmo2"))
    known, unknown = Finding(), Finding()
    add_served(known, served, RankCounts())
    add_served(unknown, replace(served, is_tried=False), RankCounts())
    assert known.problems == []
    (problem,) = unknown.problems
    assert "Olmo2ForCausalLM" in problem and "was never tried" in problem
    assert unknown.facts["served by"] == "transformers, which was never tried with this family"


def test_a_truncated_file_of_weights_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose header names more bytes than there are, of the own decoder and of transformers' models."""
    for make, family in ((make_checkpoint, "llama"), (make_foreign_checkpoint, "olmo2")):
        folder = make(tmp_path / family, family)
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        code, text = checked(capsys, str(folder))
        assert code == 1
        assert "problem: model: " in text and "cannot be read as safetensors" in text


def test_a_group_has_its_gpus_and_its_memory_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_foreign_checkpoint(tmp_path, "qwen3_moe", hidden_size=1024, moe_intermediate_size=1024)
    found = json.loads(checked(capsys, "--json", str(folder))[1])
    assert not found.keys() & {"GPUs", "weights on each GPU", "weights on all GPUs"}
    ranks = ("--data-parallel-size", "4", "--tensor-parallel-size", "2")
    found = json.loads(checked(capsys, "--json", *ranks, str(folder))[1])
    assert found["GPUs"].startswith("8 side by side")
    served = examine(folder)
    assert served.num_weight_bytes is not None
    # Each rank has a quarter of the experts and all other weights, and each of its two processes a half of that.
    of_process = (served.num_weight_bytes - served.num_expert_bytes * 3 // 4) // 2
    assert found["weights on each GPU"] == f"about {of_process / 2**30:.2f} GiB" != "about 0.00 GiB"
    assert found["weights on all GPUs"] == f"about {8 * of_process / 2**30:.2f} GiB"
    assert not any("data_parallel_size" in problem for problem in found["problems"])


@pytest.mark.parametrize(
    ("family", "size", "told"),
    [
        ("llama", 2, "data_parallel_size is 2, and the model has no experts that can be spread"),
        ("olmo2", 2, "data_parallel_size is 2, and the model has no experts that can be spread"),
        ("qwen3_moe", 5, "data_parallel_size is 5, and the model has 4 experts; each rank needs one"),
    ],
    ids=["dense", "transformers", "many"],
)
def test_a_group_that_cannot_start_is_a_problem(
    family: str, size: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And ends `up` before a process starts, in the same words."""
    make = make_checkpoint if family == "llama" else make_foreign_checkpoint
    folder = make(tmp_path, family)
    flags = ("--data-parallel-size", str(size))
    code, text = checked(capsys, *flags, str(folder))
    assert code == 1
    assert f"problem: {told}" in text
    with pytest.raises(SettingError, match=told):
        check_model(parse(UpSettings, "kvbaton up", flags), folder)


def test_too_few_gpus_for_a_group_are_a_problem() -> None:
    """A machine without GPUs, or with one that its ranks share, may still serve it."""
    ranks = RankCounts(data=4, tensor=2)
    for num_gpus in (0, 1, 8):
        found = Finding()
        add_devices(found, ranks, num_gpus)
        assert found.problems == []
    add_devices(found, ranks, 6)
    (problem,) = found.problems
    assert problem.startswith("data_parallel_size: each group of 4 ranks needs 8 GPUs side by side, and this")
