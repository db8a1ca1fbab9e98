"""A model folder without weights: byte-level BPE whose vocabulary a test can spell out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, END = 0, 1
FIRST_BYTE = len(SPECIAL)
WORDS = ["hello", "Ġworld", "Ġagain", "ing", "STOP"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
UNPRINTABLE = [byte for byte in range(256) if byte not in PRINTABLE]
CHARACTER = {b: chr(b) for b in PRINTABLE} | {b: chr(256 + n) for n, b in enumerate(UNPRINTABLE)}
"""GPT-2's way to write a byte as a character."""


def byte_ids(data: bytes) -> list[int]:
    """Token ids that stand for one byte each."""
    return [FIRST_BYTE + byte for byte in data]


def word_id(word: str) -> int:
    """The id of one of WORDS (a leading space written as such)."""
    return FIRST_BYTE + 256 + WORDS.index(word.replace(" ", "Ġ"))


def tiny_tokenizer(words: list[str] | None = None) -> Tokenizer:
    """Special tokens, one token a byte, then whole words (matched as they are, ``ignore_merges``)."""
    names = [*SPECIAL, *[CHARACTER[byte] for byte in range(256)], *(WORDS if words is None else words)]
    backend = Tokenizer(
        models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], ignore_merges=True)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return backend


def model_files(**config: Any) -> dict[str, bytes]:
    """The files of a model folder by name; ``config`` goes over config.json."""
    files: Mapping[str, Any] = {
        "config.json": {
            "vocab_size": 300,
            "max_position_embeddings": 128,
            "hidden_size": 4,
            "eos_token_id": END,
            **config,
        },
        "tokenizer_config.json": {
            "bos_token": "<|bos|>",
            "eos_token": "<|end|>",
            "chat_template": TEMPLATE,
        },
        "generation_config.json": {},
    }
    encoded = {name: json.dumps(value).encode() for name, value in files.items()}
    return {**encoded, "tokenizer.json": tiny_tokenizer().to_str().encode()}


def write_model(folder: Path, files: Mapping[str, bytes] | None = None) -> Path:
    """Write a model folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (files or model_files()).items():
        (folder / name).write_bytes(data)
    return folder
