"""The small files of a model folder, for a router without it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from contract.model_folder import MAX_TOKENIZER_BYTES, read_bytes
from text.model_card import MODEL_FILES

_CHUNK_BYTES = 2**20


async def model_files(folder: Path) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the model's small files in pieces (name, bytes to append)."""
    for name in MODEL_FILES:
        data = await asyncio.to_thread(read_bytes, folder / name, MAX_TOKENIZER_BYTES) or b""
        for start in range(0, len(data), _CHUNK_BYTES):
            yield name, data[start : start + _CHUNK_BYTES]
