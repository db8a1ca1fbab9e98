"""The facts that are read from a model folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from contract.errors import SettingError
from contract.model_folder import LENGTH_NAMES
from tests.text.tiny_model import END, TEMPLATE, model_files, write_model
from text.chat import Chat
from text.model_card import ModelCard


def card_with(tmp_path: Path, **files: Any) -> ModelCard:
    given = {f"{name}.json": json.dumps(value).encode() for name, value in files.items()}
    return ModelCard.from_folder(write_model(tmp_path / "tiny", model_files() | given))


def test_a_card_of_a_plain_folder(tmp_path: Path) -> None:
    card = card_with(tmp_path)
    assert (card.name, card.max_model_len, card.vocab_size, card.eos_token_ids) == ("tiny", 128, 300, (END,))
    assert (card.defaults.temperature, card.defaults.top_p, card.defaults.top_k) == (1.0, 1.0, 0)
    assert card.chat_template is not None


def test_generation_defaults_and_end_tokens(tmp_path: Path) -> None:
    card = card_with(
        tmp_path,
        generation_config={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "eos_token_id": [7, 9]},
    )
    assert (card.defaults.temperature, card.defaults.top_p, card.defaults.top_k) == (0.7, 0.8, 20)
    assert card.eos_token_ids == (END, 7, 9)


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    text = {"vocab_size": 50, "n_positions": 64}
    card = card_with(tmp_path, config={"text_config": text})
    assert (card.vocab_size, card.max_model_len) == (50, 64)


@pytest.mark.parametrize("name", LENGTH_NAMES)
def test_each_published_name_of_the_length_is_read(tmp_path: Path, name: str) -> None:
    """Kimi-Linear has model_max_length alone."""
    assert card_with(tmp_path, config={"vocab_size": 50, name: 64}).max_model_len == 64


def test_a_model_of_recurrent_layers_alone_needs_no_positions(tmp_path: Path) -> None:
    """A worker reports its own length."""
    assert card_with(tmp_path, config={"vocab_size": 50, "state_size": 16}).max_model_len == 8192


@pytest.mark.parametrize(
    ("config", "words"),
    [({"vocab_size": 5}, "max_position_embeddings"), ({"n_ctx": 5}, "vocab_size")],
)
def test_what_is_missing_is_named(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        card_with(tmp_path, config=config)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"contains no config\.json"):
        ModelCard.from_folder(tmp_path)


def test_the_template_file_goes_over_the_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text("from the file: {{ messages[0].content }}")
    card = ModelCard.from_folder(folder)
    assert card.chat_template is not None
    assert card.chat_template.render(Chat(messages=[{"role": "user", "content": "x"}])) == "from the file: x"


@pytest.mark.parametrize(
    ("found", "has_template"),
    [
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": TEMPLATE}], True),
        ([], False),
        (None, False),
    ],
)
def test_named_templates_and_none(tmp_path: Path, found: Any, has_template: bool) -> None:
    config = {"chat_template": found, "eos_token": {"content": "<|end|>"}}
    card = card_with(tmp_path, tokenizer_config=config)
    assert (card.chat_template is not None) == has_template


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": "end"}},
        {"generation_config": {"temperature": "hot"}},
        {"tokenizer_config": {"added_tokens_decoder": None}},
        {"tokenizer_config": {"chat_template": ["plain"]}},
        {"config": {"text_config": 7}},
    ],
)
def test_a_file_of_another_shape_is_a_setting_error(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        card_with(tmp_path, **files)


def each(file: str, field: str, *values: Any) -> list[tuple[str, str, Any]]:
    return [(file, field, value) for value in values]


WRONG_FIELDS = [
    *each(
        "generation_config",
        "eos_token_id",
        -1,
        True,
        1.5,
        "2",
        "end",
        [1, [2]],
        {},
        2**31,
        10**30,
        [-1],
        [None],
    ),
    *each("config", "eos_token_id", -1, [True], "x"),
    *each("generation_config", "temperature", -1, 2.5, 1e400, True, [1]),
    *each("generation_config", "top_p", 0, -0.5, 1.5),
    *each("generation_config", "top_k", -2, 1.5, 1e300),
    *each("generation_config", "min_p", -0.1, 1.5),
    *each("generation_config", "repetition_penalty", 0, -1, 1e9),
    *each("config", "text_config", 7, "x", [1], True),
    *each("config", "hidden_size", -1, 0, "x", 1.5, True, 10**30),
    *each("tokenizer_config", "added_tokens_decoder", 7, [1], {"x": {"content": "a"}}, {"1": {}}),
    *each("tokenizer_config", "added_tokens_decoder", {"1": {"content": 5}}, {"1" * 5000: {}}, {"²": {}}),
]


@pytest.mark.parametrize(("file", "field", "value"), WRONG_FIELDS, ids=str)
def test_a_wrong_value_is_an_error_that_names_file_and_field(
    tmp_path: Path, file: str, field: str, value: Any
) -> None:
    """L8: the service started, and refused every request (or failed with it); or the error named the folder alone."""
    fields: dict[str, Any] = {"vocab_size": 300, "max_position_embeddings": 128} if file == "config" else {}
    with pytest.raises(SettingError, match=rf"{file}\.json.*{field}"):
        card_with(tmp_path, **{file: fields | {field: value}})


def test_null_and_other_spellings_of_no_choice_are_taken(tmp_path: Path) -> None:
    generation = {"top_k": -1, "temperature": None, "eos_token_id": None}
    card = card_with(
        tmp_path,
        config={
            "vocab_size": 300,
            "max_position_embeddings": 128,
            "eos_token_id": [4, 4],
            "text_config": None,
        },
        generation_config=generation,
        tokenizer_config={},
    )
    assert (card.defaults.top_k, card.defaults.temperature) == (0, 1.0)
    assert card.eos_token_ids == (4,)


def test_a_file_with_half_of_a_surrogate_pair_is_refused_by_name(tmp_path: Path) -> None:
    """L8: the template was taken, and every chat failed."""
    files = model_files() | {"tokenizer_config.json": b'{"chat_template": "{{ 1 }}\\uD83d"}'}
    with pytest.raises(SettingError, match=r"tokenizer_config\.json contains half of a surrogate pair"):
        ModelCard.from_folder(write_model(tmp_path / "tiny", files))
    whole = model_files() | {"tokenizer_config.json": b'{"chat_template": "\\ud83d\\ude00"}'}
    assert ModelCard.from_folder(write_model(tmp_path / "whole", whole)).chat_template is not None
