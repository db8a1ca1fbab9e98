"""Read the text of each token from a model folder's ``tokenizer.json``, in the grammar library's form."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from contract.errors import SettingError, UnsupportedFieldError
from contract.model_folder import MAX_TOKENIZER_BYTES, read_text

_MAX_ID = 2**24 - 1
"""The library's table is as long as the largest token id."""
VocabularyLoader = Callable[[Path, Sequence[int]], LLTokenizer]


def load_vocabulary(folder: Path, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load the vocabulary of byte-level BPE or of sentencepiece with byte fallback. Takes up to a second.

    Raises UnsupportedFieldError about ``grammar`` if the library cannot read the tokenizer.
    """
    try:
        text = read_text(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
        if text is None:
            raise SettingError(f"{folder} has no tokenizer.json", param="model")
        spec = json.loads(text)
        added = [token["id"] for token in spec["added_tokens"]]
        _check_ids([*added, *_ids(spec["model"]["vocab"])])
        ends = [token for token in eos_token_ids if token in added] or added[:1] or None
        return LLTokenizer(text, eos_token=ends)
    except (
        SettingError,
        OSError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise UnsupportedFieldError(
            f"grammars are not served with this model, its tokenizer cannot be read for them: {error}",
            param="grammar",
        ) from error


def _ids(vocab: Any) -> Iterable[int]:
    return vocab.values() if isinstance(vocab, dict) else range(len(vocab))


def _check_ids(ids: Iterable[int]) -> None:
    if not all(0 <= token <= _MAX_ID for token in ids):
        raise ValueError(f"a token id is not in 0..{_MAX_ID}")
