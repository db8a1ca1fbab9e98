"""Hostile tokenizer.json files: an error names the file, and the process survives."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from contract.errors import InvalidRequestError, SettingError
from tests.text.tiny_model import model_files, write_model
from text.tokenizer import Tokenizer
from text.tokenizer_checks import MAX_GROWTH, check_growth, check_patterns

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
    (steps("normalizer", EMPTY), "the model's tokenizer failed on this text: index out of bounds"),
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


def splitting(pattern: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that lets a tokenizer split texts by this pattern."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return steps("pre_tokenizer", split)


def test_a_panic_while_a_text_is_tokenized_is_the_callers_error(tmp_path: Path) -> None:
    """L8: the request's connection was closed without an answer. The trial at the start does not find every text."""
    text = (folder_with(tmp_path, splitting("(a+)+$")) / "tokenizer.json").read_text()
    tokenizer = Tokenizer(FastTokenizer.from_str(text), {})
    assert tokenizer.encode("aa")
    with pytest.raises(InvalidRequestError, match="the model's tokenizer failed on this text"):
        tokenizer.encode("a" * 60 + "b")


PANICKING = """
from tokenizers import Regex, pre_tokenizers
from cli.main import run_command
run_command(["--version"])
splitter = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
try:
    splitter.pre_tokenize_str("a" * 60 + "b")
except BaseException as error:
    assert type(error).__name__ == "PanicException"
"""


@pytest.mark.parametrize("wish", ["1", "full"])
def test_a_panic_writes_no_backtrace_whatever_the_environment_says(wish: str) -> None:
    """A8: each request with such a text wrote some 80 lines to stderr if RUST_BACKTRACE was set."""
    command = ["env", f"RUST_BACKTRACE={wish}", sys.executable, "-c", PANICKING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert "panicked at" in done.stderr
    assert len(done.stderr.splitlines()) < 5 and len(done.stderr) < 500, done.stderr


EXPLODING = [
    "(a+)+$",
    r"(\w+\s?)+$",
    "(x+x+)+y",
    r"(\p{L}|\p{L}\p{L})*!!",
    "(?:(?:z|zz)+)+q",
    "(",
    r"(.*)(.*)(.*)(.*)\d=k",
]
PUBLISHED = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+",
    " {2,}",
]


@pytest.mark.parametrize(
    ("pattern", "place"),
    [*((one, "pre_tokenizer") for one in EXPLODING), (EXPLODING[0], "normalizer"), (EXPLODING[0], "decoder")],
)
def test_a_pattern_that_explodes_is_refused(pattern: str, place: str) -> None:
    """A8: a text of 60 characters took 1.7 s, one of 64 KiB 500 s; wherever the pattern stands."""
    step = {"type": "Sequence", "inner": [{"type": "Split", "pattern": {"Regex": pattern}}]}
    with pytest.raises(ValueError, match="takes too long on some text, or fails"):
        check_patterns(json.dumps({place: step, "model": {"vocab": {"Regex": 1}}}))


def test_a_folder_with_such_a_pattern_is_refused(tmp_path: Path) -> None:
    """A8: at the start and in ``kvbaton check``, before a client can send the text."""
    with pytest.raises(SettingError, match="takes too long"):
        Tokenizer.from_folder(folder_with(tmp_path, splitting("(a+)+$")))


def test_patterns_of_published_models_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    steps = [{"pattern": {"Regex": pattern}} for pattern in PUBLISHED]
    check_patterns(json.dumps({"pre_tokenizer": {"pretokenizers": steps}}))
    assert not caplog.records
    check_patterns(json.dumps({"pre_tokenizer": {"pattern": {"Regex": r"\s+$"}}}))
    assert "grows with the square" in caplog.text


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
