"""Chunks of a stream that differ in their text only."""

import secrets
from collections.abc import Callable

import msgspec

from router.http.bodies.body import Json

_PLACE = secrets.token_hex(16)
"""The text in the place of the real one. No other value of a chunk contains it."""


class TextChunks:
    """Writes the chunks of one choice. What is around the text is encoded once. chunk: returns the chunk with a text."""

    def __init__(self, chunk: Callable[[str], Json]) -> None:
        around = msgspec.json.encode(chunk(_PLACE)).split(msgspec.json.encode(_PLACE))
        self._before, self._after = around

    def with_text(self, text: str) -> msgspec.Raw:
        """Return the JSON of the chunk with this text."""
        return msgspec.Raw(self._before + msgspec.json.encode(text) + self._after)
