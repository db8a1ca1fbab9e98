"""Decodes bytes from outside this process; the one list of the errors that a decoder can raise.

A peer, a client or a file chooses these bytes, so every failure must become an error of the call and never end a thread.
Nested input raises RecursionError, long numbers OverflowError or ValueError, broken text UnicodeDecodeError.
"""

import struct
from collections.abc import Callable
from typing import TypeVar

import msgspec

from contract.errors import KvbatonError

DECODING_ERRORS: tuple[type[Exception], ...] = (
    msgspec.MsgspecError,
    ValueError,  # also JSONDecodeError and UnicodeDecodeError
    OverflowError,
    RecursionError,
    MemoryError,
    struct.error,
)
_D = TypeVar("_D")
_T = TypeVar("_T")


def decode_outside(decode: Callable[[_D], _T], data: _D, refusal: Callable[[str], KvbatonError]) -> _T:
    """Return ``decode(data)``. Raises the error that ``refusal`` builds from the decoder's message."""
    try:
        return decode(data)
    except DECODING_ERRORS as error:
        raise refusal(shown(str(error) or type(error).__name__)) from error


def shown(text: str, max_characters: int = 300) -> str:
    """Return untrusted text for a log line or an error: printable characters only, and a limited number."""
    printable = "".join(character if character.isprintable() else "?" for character in text[:max_characters])
    return printable + ("..." if len(text) > max_characters else "")
