"""Hostile tokenizer.json files: an error names the file, and the process survives."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contract.errors import InternalError, SettingError
from tests.text.tiny_model import model_files, write_model
from text.growth import MAX_GROWTH, check_growth
from text.tokenizer import Tokenizer

TEN_OF_ONE = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 10}
EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": "x"}
LONG = {"type": "Prepend", "prepend": "x" * 10**6}
COPIES: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000,
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {},
}
NO_TOKEN = COPIES | {"single": [{"SpecialToken": {"id": "none", "type_id": 0}}]}


def folder_with(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    folder = write_model(tmp_path / "model", model_files())
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    change(spec)
    file.write_text(json.dumps(spec))
    return folder


def steps(name: str, *each: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    inner = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}[name]
    return lambda spec: spec.update({name: {"type": "Sequence", inner: list(each)}})


HOSTILE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (steps("normalizer", *[TEN_OF_ONE] * 9), "its normalizer can turn one character into more than 4096"),
    (steps("normalizer", {"type": "Sequence", "normalizers": [TEN_OF_ONE] * 4}), "its normalizer can turn"),
    (steps("normalizer", LONG), "its normalizer can turn"),
    (steps("pre_tokenizer", *[{"type": "ByteLevel"}] * 50), "its pre_tokenizer can turn"),
    (steps("decoder", TEN_OF_ONE | {"content": "y" * 5000}), "its decoder can turn"),
    (
        lambda spec: spec.update(post_processor=COPIES),
        "its post_processor can turn one character into more than 16",
    ),
    (lambda spec: spec.update(post_processor=NO_TOKEN), "tokenizer.json is not a valid tokenizer"),
    (steps("normalizer", EMPTY), "the model's tokenizer failed: index out of bounds"),
    (
        steps("normalizer", {"type": "Precompiled", "precompiled_charsmap": "////////"}),
        "shorter than its declared length",
    ),
    (lambda spec: spec.update(normalizer=[1]), "tokenizer.json is not a valid tokenizer"),
    (lambda spec: spec["model"]["vocab"].update(z=2**32 - 1), "it has token id 4294967295"),
    (
        lambda spec: spec["model"].update(continuing_subword_prefix="é" * 10, merges=[["a", "b"]]),
        "tokenizer.json is not a valid tokenizer",
    ),
    (
        lambda spec: spec.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}),
        "Missing .UNK. token",
    ),
]


@pytest.mark.parametrize(("harm", "words"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_tokenizer_is_refused_by_name(
    tmp_path: Path, harm: Callable[[dict[str, Any]], object], words: str
) -> None:
    """L8: a panic of the library is not an Exception, and a failed allocation ends the process."""
    with pytest.raises(SettingError, match=words) as caught:
        Tokenizer.from_folder(folder_with(tmp_path, harm))
    assert "tokenizer.json" in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_panic_while_a_text_is_tokenized_is_the_callers_error(tmp_path: Path) -> None:
    """L8: the request's connection was closed without an answer."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, steps("pre_tokenizer", split)))
    assert tokenizer.encode("aa")
    with pytest.raises(InternalError, match="the model's tokenizer failed"):
        tokenizer.encode("a" * 60 + "b")


def test_what_published_tokenizers_have_is_taken() -> None:
    sentencepiece = [
        {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="},
        {"type": "Lowercase"},
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        {"type": "Prepend", "prepend": "▁"},
    ]
    spec = {"normalizer": {"type": "Sequence", "normalizers": sentencepiece}, "post_processor": None}
    check_growth(json.dumps(spec))
    assert MAX_GROWTH > 18 * 3 * 18


def with_added(num: int, length: int) -> Callable[[dict[str, Any]], None]:
    """Return a change that gives a tokenizer so many added tokens of this length."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def change(spec: dict[str, Any]) -> None:
        first = len(spec["model"]["vocab"]) + len(spec["added_tokens"])
        spec["added_tokens"] += [
            {"id": first + number, "content": f"<{number}>".ljust(length, "x"), "special": True, **flags}
            for number in range(num)
        ]

    return change


@pytest.mark.parametrize(
    ("num", "length", "words"),
    [
        (2**17 + 1, 4, "added tokens; the limit is 131072"),
        (1000, 2200, "added tokens have .* characters; the limit is 2097152"),
    ],
)
def test_added_tokens_are_bounded_before_the_library_reads_them(
    num: int, length: int, words: str, tmp_path: Path
) -> None:
    """600,000 of them took the library two minutes and a gigabyte."""
    with pytest.raises(SettingError, match=words):
        Tokenizer.from_folder(folder_with(tmp_path, with_added(num, length)))


def test_the_added_tokens_of_the_configuration_are_bounded_too(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, lambda spec: None)
    added = {str(1000 + number): {"content": f"<{number}>".ljust(2200, "x")} for number in range(1000)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(SettingError, match="the limit is 2097152"):
        Tokenizer.from_folder(folder)


def test_as_many_added_tokens_as_published_models_have_are_read(tmp_path: Path) -> None:
    """Half of them are in tokenizer_config.json only; they get their ids in their order."""
    folder = folder_with(tmp_path, with_added(3000, 20))
    added = {str(10_000 + number): {"content": f"[{number}]"} for number in range(3000)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = Tokenizer.from_folder(folder)
    first = tokenizer.token_id("[0]")
    assert first is not None
    assert [tokenizer.token_id(f"[{number}]") for number in (0, 1, 2999)] == [first, first + 1, first + 2999]
    assert tokenizer.encode("[2999]") == [first + 2999]
