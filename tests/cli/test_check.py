"""``kvbaton check``: its report about a model folder, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import run_command
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
    """F4: the probe's report is printed."""
    folder = folder_with(tmp_path, GENERIC, architectures=["LlamaForCausalLM"], torch_dtype="bfloat16")
    code, text = checked(capsys, str(folder))
    assert code == 0
    lines = [line.split("  ") for line in text.splitlines()]
    found = {words[0]: words[-1].strip() for words in lines if len(words) > 1}
    assert (found["architecture"], found["dtype"]) == ("LlamaForCausalLM", "bfloat16")
    assert (found["context length"], found["end tokens"]) == ("128", "1 <|end|>")
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
    assert words in text.splitlines()[-1] or words in text


def test_a_folder_without_weights_is_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = checked(capsys, str(write_model(tmp_path / "tiny")))
    assert code == 1
    assert "no weights" in text


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
        assert not [line for line in text.splitlines() if line.startswith("problem: ") and "owned" in line]


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
    assert checked(capsys, str(folder))[0] == 0
