"""Token ids equal to those of transformers, and the bytes of single tokens."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, processors

from contract.errors import SettingError
from tests.text.tiny_model import END, byte_ids, model_files, tiny_tokenizer, word_id, write_model
from text.tokenizer import Tokenizer


def folder_with(tmp_path: Path, **tokenizer_config: Any) -> Path:
    config = {"bos_token": "<|bos|>", "eos_token": "<|end|>", **tokenizer_config}
    files = model_files() | {"tokenizer_config.json": json.dumps(config).encode()}
    return write_model(tmp_path / "model", files)


def sentencepiece_like() -> Backend:
    """A Llama-2 style tokenizer: spaces as U+2581, bytes as a fallback, a BOS by the post-processor."""
    names = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "▁the", "▁cat", "s"]
    backend = Backend(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            ignore_merges=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"266": {"content": "<tool>", "special": False, "lstrip": False}}},
        {"pad_token": "<pad>"},
    ],
)
def test_encodes_and_decodes_as_transformers_does(tmp_path: Path, config: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = folder_with(tmp_path, tokenizer_class="PreTrainedTokenizerFast", **config)
    ours, theirs = Tokenizer.from_folder(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("hello world again", "<|user|>hé €<tool>ing<pad>", "", " \n x"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_bos_comes_from_the_post_processor_alone(tmp_path: Path) -> None:
    without = Tokenizer.from_folder(folder_with(tmp_path, add_bos_token=True))
    assert without.encode("hello") == [word_id("hello")]
    assert Tokenizer(sentencepiece_like(), {}).encode("") == [1]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    files = model_files() | {"tokenizer.json": backend.to_str().encode()}
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "model", files))
    assert len(tokenizer.encode("hello world again")) == 3


@pytest.mark.parametrize(
    ("token", "expected"), [("<0xE2>", b"\xe2"), ("▁the", b" the"), ("s", b"s"), ("<s>", b"<s>")]
)
def test_bytes_of_a_sentencepiece_token(token: str, expected: bytes) -> None:
    tokenizer = Tokenizer(sentencepiece_like(), {})
    token_id = tokenizer.token_id(token)
    assert token_id is not None
    assert tokenizer.token_bytes(token_id) == expected


def test_bytes_of_a_byte_level_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    assert tokenizer.token_bytes(word_id(" world")) == b" world"
    assert [tokenizer.token_bytes(i) for i in byte_ids("€".encode())] == [b"\xe2", b"\x82", b"\xac"]
    assert tokenizer.token_bytes(END) == b"<|end|>"
    assert tokenizer.token_bytes(10_000) == b""


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"contains no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingError, match="is not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(SettingError, match="not valid JSON"):
        Tokenizer.from_folder(tmp_path)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Set a short switch interval: threads that wait for the GIL get it within 0.1 ms if its holder is interruptible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
async def test_others_run_while_a_long_text_is_tokenized(tmp_path: Path) -> None:
    """A router's streams go on beside a prompt of half a million characters, which is tokenized in a thread."""
    tokenizer = Tokenizer.from_folder(write_model(tmp_path / "tiny"))
    encoding = asyncio.create_task(asyncio.to_thread(tokenizer.encode, "hello " * 100_000))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert len(encoding.result()) > 100_000
    assert num_turns > 5_000
