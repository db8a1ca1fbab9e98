"""The chat templates of a model folder, in every layout."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from tests.text.tiny_model import model_files, write_model
from text.chat import Chat
from text.model_card import ModelCard

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
SHOWS = "{{ messages[0].content }}"


def folder_with(tmp_path: Path, **files: Any) -> Path:
    """Return a model folder whose tokenizer_config.json has no template; files by name, __ for a folder."""
    config = {"tokenizer_config.json": b'{"eos_token": "<|end|>", "pad_token": "<|bos|>"}'}
    folder = write_model(tmp_path / "tiny", model_files() | config)
    for name, text in files.items():
        file = folder / name.replace("__", "/").replace("_json", ".json").replace("_jinja", ".jinja")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


def prompt(folder: Path, **options: Any) -> str:
    template = ModelCard.from_folder(folder).chat_template
    assert template is not None
    return template.render(Chat(messages=[USER], **options))


def prompts(folder: Path) -> list[str]:
    """Return the prompts of a chat, a chat with tools, and a chat with documents."""
    return [prompt(folder), prompt(folder, tools=(TOOL,)), prompt(folder, documents=({"text": "d"},))]


NAMED = {
    "default": f"plain {SHOWS}",
    "tool_use": f"tools {SHOWS}{{{{ tools[0].function.name }}}}",
    "rag": f"rag {SHOWS}{{{{ documents[0].text }}}}",
}
WANTED = ["plain x", "tools xf", "rag xd"]


def test_additional_templates_are_read(tmp_path: Path) -> None:
    """F8: additional_chat_templates/*.jinja, as transformers saves them, were not read."""
    additional = {f"additional_chat_templates__{name}_jinja": NAMED[name] for name in ("tool_use", "rag")}
    folder = folder_with(tmp_path, chat_template_jinja=NAMED["default"], **additional)
    assert prompts(folder) == WANTED


@pytest.mark.parametrize("form", ["list", "object"])
@pytest.mark.parametrize("file", ["tokenizer_config_json", "chat_template_json", "processor_config_json"])
def test_named_templates_of_json_files_are_read(file: str, form: str, tmp_path: Path) -> None:
    """F8: chat_template.json and the files of processors were not read."""
    listed = [{"name": name, "template": text} for name, text in NAMED.items()]
    assert (
        prompts(folder_with(tmp_path, **{file: {"chat_template": listed if form == "list" else NAMED}}))
        == WANTED
    )


@pytest.mark.parametrize("file", ["tokenizer_config_json", "chat_template_json", "processor_config_json"])
def test_one_template_of_a_json_file_is_read(file: str, tmp_path: Path) -> None:
    """F8: chat_template.json and the files of processors were not read."""
    assert prompt(folder_with(tmp_path, **{file: {"chat_template": NAMED["default"]}})) == "plain x"


def test_files_go_over_json_and_the_tokenizer_over_the_processor(tmp_path: Path) -> None:
    files: dict[str, Any] = {
        "processor_config_json": {"chat_template": f"1 {SHOWS}"},
        "chat_template_json": {"chat_template": f"2 {SHOWS}"},
        "tokenizer_config_json": {"chat_template": f"3 {SHOWS}"},
        "chat_template_jinja": f"4 {SHOWS}",
    }
    for number, name in enumerate(files, 1):
        folder = folder_with(tmp_path / name, **dict(list(files.items())[:number]))
        assert prompt(folder) == f"{number} x"


def test_a_folder_without_a_default_template_has_none(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, additional_chat_templates__rag_jinja=NAMED["rag"])
    assert ModelCard.from_folder(folder).chat_template is None


def test_a_template_gets_every_named_special_token(tmp_path: Path) -> None:
    """F8: templates get pad_token and the like, as from transformers."""
    folder = folder_with(tmp_path, chat_template_jinja=f"{{{{ pad_token }}}}{SHOWS}{{{{ eos_token }}}}")
    assert prompt(folder) == "<|bos|>x<|end|>"


def test_a_template_that_is_too_large_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, chat_template_jinja="x" * (4 * 2**20 + 1))
    with pytest.raises(SettingError, match="limit of a chat template is 4194304"):
        ModelCard.from_folder(folder)


def test_a_template_of_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"chat_template\.jinja is not valid UTF-8"):
        ModelCard.from_folder(folder)


def test_additional_templates_are_bounded_together(tmp_path: Path) -> None:
    """L8: each file had a limit, and their number none."""
    folder = folder_with(tmp_path, chat_template_jinja=SHOWS)
    (folder / "additional_chat_templates").mkdir()
    for number in range(12):
        with (folder / "additional_chat_templates" / f"{number}.jinja").open("wb") as file:
            file.truncate(2**20)
    with pytest.raises(SettingError, match=r"the chat templates up to .* have more than 4194304 characters"):
        ModelCard.from_folder(folder)


def test_a_pipe_among_the_additional_templates_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, chat_template_jinja=SHOWS)
    (folder / "additional_chat_templates").mkdir()
    os.mkfifo(folder / "additional_chat_templates" / "rag.jinja")
    with pytest.raises(SettingError, match=r"rag\.jinja is a pipe"):
        ModelCard.from_folder(folder)


def test_a_template_whose_name_is_no_text_is_left_out(tmp_path: Path) -> None:
    listed = [{"name": ["x"], "template": "y"}, {"name": "default", "template": f"plain {SHOWS}"}]
    assert prompt(folder_with(tmp_path, tokenizer_config_json={"chat_template": listed})) == "plain x"
