"""The facts about a model that text processing needs, read from its folder without its weights.

Its chat templates are found in every layout that ``transformers`` has used.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import InvalidRequestError, SettingError
from contract.model_folder import (
    LENGTH_NAMES,
    LENGTH_WITHOUT_POSITIONS,
    check_entries,
    end_token_ids,
    read_text,
)
from contract.sampling import MODEL_DEFAULTS, SamplingParams
from text.parsing.answer_format import AnswerFormat, ParserChoice
from text.templates.attempt import Prompt
from text.templates.chat_template import ChatTemplate
from text.templates.process import ProcessRenderer
from text.templates.sandbox import DEFAULT
from text.tokenizer import Tokenizer, read_json

TEMPLATE_FILE = "chat_template.jinja"
ADDITIONAL_FOLDER = "additional_chat_templates"
_JSON_FILES = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
_MAX_TEMPLATE_BYTES = 4 * 2**20
TEMPLATE_FILES = (
    TEMPLATE_FILE,
    f"{ADDITIONAL_FOLDER}/tool_use.jinja",
    f"{ADDITIONAL_FOLDER}/rag.jinja",
    "chat_template.json",
    "processor_config.json",
)
"""The files from which templates are read, apart from tokenizer_config.json."""
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    *TEMPLATE_FILES,
)
"""The small files from which a model card is read."""
_MAX_SIZE = 2**31 - 1
_MAX_NUMBER = 1e9


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A served model.

    max_model_len: maximum number of tokens of prompt and answer. eos_token_ids: tokens that end an answer. vocab_size: token
    ids are below this. defaults: its generation defaults. chat_template: None for a model without one. answer_format: the
    format of its tool calls and reasoning. hidden_size: length of an embedding; None if config.json does not have it.
    special_tokens_in_messages: special tokens that a client types in a message are encoded as such.
    """

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    defaults: SamplingParams
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    answer_format: AnswerFormat
    hidden_size: int | None = None
    special_tokens_in_messages: bool = False

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Return the ids of a chat's prompt, with typed special tokens as text unless they are allowed.

        Raises InvalidRequestError if the tokenizer cannot encode them as text.
        """
        if self.special_tokens_in_messages or prompt.texts is None:
            return self.tokenizer.encode(prompt.text, add_special_tokens=False)
        return self.tokenizer.encode_messages(prompt.text, prompt.texts)

    def close(self) -> None:
        """Close the chat template's renderer; the card must not be used afterwards."""
        if self.chat_template is not None:
            self.chat_template.close()

    @classmethod
    def from_folder(
        cls, folder: Path, name: str | None = None, parsers: ParserChoice | None = None
    ) -> "ModelCard":
        """Read a Hugging Face model folder. Raises SettingError that names missing or invalid parts."""
        try:
            return cls._read(folder, name, parsers or ParserChoice())
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise SettingError(
                f"the model files in {folder} cannot be read: {error!r}", param="model"
            ) from error

    @classmethod
    def _read(cls, folder: Path, name: str | None, parsers: ParserChoice) -> "ModelCard":
        check_entries(folder)
        config = read_json(folder / "config.json")
        if not config:
            raise SettingError(f"{folder} contains no config.json", param="model")
        # A multimodal model has the configuration of its text part within that of the whole.
        part = config.get("text_config")
        if not isinstance(part, dict | None):
            raise SettingError(
                f"model: config.json cannot be read: text_config is {part!r:.80}; it must be an object",
                param="model",
            )
        config = part or config
        generation = read_json(folder / "generation_config.json")
        tokenizer = Tokenizer.from_folder(folder)
        named = read_templates(folder)
        template = (
            None
            if not named
            else ChatTemplate(
                named[DEFAULT],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                named=named,
                tokens=tokenizer.named_tokens,
                special=tokenizer.special_tokens,
                make_renderer=ProcessRenderer,
            )
        )
        own_end = tokenizer.token_id(tokenizer.eos_token)
        end_tokens = {*end_token_ids(config, generation), *([] if own_end is None else [own_end])}
        return cls(
            name=name or folder.resolve().name,
            max_model_len=_max_model_len(config, folder),
            eos_token_ids=tuple(sorted(end_tokens)),
            vocab_size=_vocab_size(config, folder),
            defaults=_generation_defaults(generation),
            tokenizer=tokenizer,
            chat_template=template,
            hidden_size=None if config.get("hidden_size") is None else _size(config, "hidden_size"),
            special_tokens_in_messages=parsers.special_tokens_in_messages,
            answer_format=AnswerFormat.chosen(parsers, template.source) if template else AnswerFormat(),
        )


def _generation_defaults(generation: dict[str, Any]) -> SamplingParams:
    """Return the model's generation defaults. Raises SettingError for defaults that would make requests invalid."""
    found: dict[str, Any] = {}
    for parameter in MODEL_DEFAULTS:
        number = _number(generation, parameter.name, parameter.default)
        if number == parameter.written_for_default:
            continue
        if parameter.kind == "integer" and number != int(number):
            raise _wrong_default(f"{parameter.name} is {number}; it must be a whole number")
        found[parameter.name] = int(number) if parameter.kind == "integer" else number
    defaults = SamplingParams(**found)
    try:
        defaults.check()
    except InvalidRequestError as error:
        raise _wrong_default(error.message) from error
    return defaults


def _wrong_default(what: str) -> SettingError:
    return SettingError(f"model: generation_config.json cannot be read: {what}", param="model")


def _number(generation: dict[str, Any], name: str, default: float) -> float:
    value = generation.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise _wrong_default(f"{name} is {value!r:.80}; it must be a number")
    return float(value)


def _max_model_len(config: dict[str, Any], folder: Path) -> int:
    for name in LENGTH_NAMES:
        if config.get(name) is not None:
            return _size(config, name)
    if config.get("state_size") is not None:  # a model of recurrent layers alone, such as Mamba
        return LENGTH_WITHOUT_POSITIONS
    raise SettingError(f"{folder / 'config.json'} has none of {', '.join(LENGTH_NAMES)}", param="model")


def _vocab_size(config: dict[str, Any], folder: Path) -> int:
    if config.get("vocab_size") is None:
        raise SettingError(f"{folder / 'config.json'} has no vocab_size", param="model")
    return _size(config, "vocab_size")


def _size(config: dict[str, Any], name: str) -> int:
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise SettingError(
            f"model: config.json: {name} is {value!r:.80}; it must be a whole number within 1..{_MAX_SIZE}",
            param="model",
        )
    return value


def read_templates(folder: Path) -> dict[str, str]:
    """Return the model's chat templates by name; empty if none is named "default" or has no name.

    A template in a file takes precedence over one of the same name in tokenizer_config.json, then chat_template.json, then
    processor_config.json. Raises SettingError for a file that cannot be a template.
    """
    found: dict[str, str] = {}
    for name in _JSON_FILES:
        found = {**_templates_by_name(read_json(folder / name).get("chat_template"), folder / name), **found}
    if text := _read_template(folder / TEMPLATE_FILE):
        found[DEFAULT] = text
    additional = folder / ADDITIONAL_FOLDER
    if additional.is_dir():
        check_entries(additional)
        for file in sorted(additional.glob("*.jinja")):
            if text := _read_template(file):
                found[file.stem] = text
            if sum(map(len, found.values())) > _MAX_TEMPLATE_BYTES:
                raise SettingError(
                    f"the chat templates up to {file} have more than {_MAX_TEMPLATE_BYTES} characters",
                    param="model",
                )
    return found if DEFAULT in found else {}


def _templates_by_name(raw: Any, file: Path) -> dict[str, str]:
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


def _read_template(file: Path) -> str:
    if file.is_file() and (size := file.stat().st_size) > _MAX_TEMPLATE_BYTES:
        raise SettingError(
            f"{file} has {size} bytes; the limit of a chat template is {_MAX_TEMPLATE_BYTES}", param="model"
        )
    return read_text(file, _MAX_TEMPLATE_BYTES) or ""
