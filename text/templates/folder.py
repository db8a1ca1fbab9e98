"""Finds the chat templates of a model folder, in every layout that ``transformers`` has used."""

from pathlib import Path
from typing import Any

from contract.errors import SettingError
from contract.model_folder import check_entries, read_text
from text.templates.sandbox import DEFAULT
from text.tokenizer import read_json

TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL_FOLDER = "additional_chat_templates"
_JSON_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
_MAX_BYTES = 4 * 2**20
TEMPLATE_FILES = (
    TEMPLATE_FILE,
    f"{ADDITIONAL_FOLDER}/tool_use.jinja",
    f"{ADDITIONAL_FOLDER}/rag.jinja",
    "chat_template.json",
    "processor_config.json",
)
"""The files from which templates are read, apart from tokenizer_config.json."""


def read_templates(folder: Path) -> dict[str, str]:
    """Return the model's chat templates by name; empty if none is named "default" or has no name.

    A template in a file takes precedence over one of the same name in tokenizer_config.json, then chat_template.json, then
    processor_config.json. Raises SettingError for a file that cannot be a template.
    """
    found: dict[str, str] = {}
    for name in _JSON_FILES:
        found = {**_by_name(read_json(folder / name).get("chat_template"), folder / name), **found}
    if text := _read(folder / TEMPLATE_FILE):
        found[DEFAULT] = text
    additional = folder / ADDITIONAL_FOLDER
    if additional.is_dir():
        check_entries(additional)
        for file in sorted(additional.glob("*.jinja")):
            if text := _read(file):
                found[file.stem] = text
            if sum(map(len, found.values())) > _MAX_BYTES:
                raise SettingError(
                    f"the chat templates up to {file} have more than {_MAX_BYTES} characters", param="model"
                )
    return found if DEFAULT in found else {}


def _by_name(raw: Any, file: Path) -> dict[str, str]:
    if isinstance(raw, list):
        if not all(isinstance(entry, dict) for entry in raw):
            raise SettingError(
                f"{file} cannot be read: chat_template is not a list of templates", param="model"
            )
        raw = {name: entry.get("template") for entry in raw if isinstance(name := entry.get("name"), str)}
    if isinstance(raw, str):
        raw = {DEFAULT: raw}
    if not isinstance(raw, dict):
        return {}
    return {
        name: text for name, text in raw.items() if isinstance(name, str) and isinstance(text, str) and text
    }


def _read(file: Path) -> str:
    if file.is_file() and (size := file.stat().st_size) > _MAX_BYTES:
        raise SettingError(
            f"{file} has {size} bytes; the limit of a chat template is {_MAX_BYTES}", param="model"
        )
    return read_text(file, _MAX_BYTES) or ""
