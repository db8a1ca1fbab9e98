"""The facts about a model that text processing needs, read from its folder without its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.errors import InvalidRequestError, SettingError
from contract.model_folder import check_entries, end_token_ids
from contract.sampling import SamplingParams
from text.parsing.answer_format import AnswerFormat, ParserChoice
from text.templates.attempt import Prompt
from text.templates.chat_template import ChatTemplate
from text.templates.folder import TEMPLATE_FILES, read_templates
from text.templates.process import ProcessRenderer
from text.templates.sandbox import DEFAULT
from text.tokenizer import Tokenizer, read_json

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
_EVERY_TOKEN = -1
"""A top_k that some folders use instead of 0."""
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A served model. ``temperature`` to ``repetition_penalty`` are its generation defaults.

    max_model_len: maximum number of tokens of prompt and answer. eos_token_ids: tokens that end an answer. vocab_size: token
    ids are below this. chat_template: None for a model without one. answer_format: the format of its tool calls and
    reasoning. hidden_size: length of an embedding; None if config.json does not have it. special_tokens_in_messages: special
    tokens that a client types in a message are encoded as such.
    """

    name: str
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
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
        config = _text_config(config)
        generation = read_json(folder / "generation_config.json")
        defaults = _generation_defaults(generation)
        tokenizer = Tokenizer.from_folder(folder)
        template = _chat_template(folder, tokenizer)
        return cls(
            name=name or folder.resolve().name,
            max_model_len=_max_model_len(config, folder),
            eos_token_ids=_eos_token_ids(config, generation, tokenizer),
            vocab_size=_vocab_size(config, folder),
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            tokenizer=tokenizer,
            chat_template=template,
            hidden_size=None if config.get("hidden_size") is None else _size(config, "hidden_size"),
            special_tokens_in_messages=parsers.special_tokens_in_messages,
            answer_format=AnswerFormat.chosen(parsers, template.source) if template else AnswerFormat(),
        )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a multimodal model's configuration, else the whole configuration."""
    part = config.get("text_config")
    if not isinstance(part, dict | None):
        raise SettingError(
            f"model: config.json cannot be read: text_config is {part!r:.80}; it must be an object",
            param="model",
        )
    return part or config


def _generation_defaults(generation: dict[str, Any]) -> SamplingParams:
    """Return the model's generation defaults. Raises SettingError for defaults that would make requests invalid."""
    top_k = _number(generation, "top_k", 0)
    if top_k != int(top_k):
        raise _wrong_default(f"top_k is {top_k}; it must be a whole number")
    defaults = SamplingParams(
        temperature=_number(generation, "temperature", 1.0),
        top_p=_number(generation, "top_p", 1.0),
        top_k=0 if top_k == _EVERY_TOKEN else int(top_k),
        min_p=_number(generation, "min_p", 0.0),
        repetition_penalty=_number(generation, "repetition_penalty", 1.0),
    )
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
    for name in _LENGTH_NAMES:
        if config.get(name) is not None:
            return _size(config, name)
    raise SettingError(f"{folder / 'config.json'} has none of {', '.join(_LENGTH_NAMES)}", param="model")


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


def _eos_token_ids(
    config: dict[str, Any], generation: dict[str, Any], tokenizer: Tokenizer
) -> tuple[int, ...]:
    """Return the generation config's end tokens (else the model config's), and the tokenizer's own."""
    own = tokenizer.token_id(tokenizer.eos_token)
    return tuple(sorted({*end_token_ids(config, generation), *([] if own is None else [own])}))


def _chat_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    named = read_templates(folder)
    if not named:
        return None
    return ChatTemplate(
        named[DEFAULT],
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        named=named,
        tokens=tokenizer.named_tokens,
        special=tokenizer.special_tokens,
        make_renderer=ProcessRenderer,
    )
