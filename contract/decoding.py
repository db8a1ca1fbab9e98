"""Decodes bytes from outside this process; the one list of the errors that a decoder can raise.

A peer, a client or a file chooses these bytes, so every failure must become an error of the call and never end a thread.
Nested input raises RecursionError, long numbers OverflowError or ValueError, broken text UnicodeDecodeError.

Typed decoders are made here and nowhere else. msgspec 0.22 describes a type at its first use, and a second thread that uses
the type before its description is complete reads a null pointer: the process dies. So descriptions are made under a lock.
"""

import struct
import threading
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypeVar

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
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Unsigned = Annotated[int, msgspec.Meta(ge=0)]
"""Numbers in what is decoded: one out of its range is refused with the field's name. An ``Unsigned`` has up to 64 bits."""
_D = TypeVar("_D")
_T = TypeVar("_T")
DecHook = Callable[[type, Any], Any] | None
"""Makes a value of a type that msgspec does not support."""
_describing = threading.RLock()


def msgpack_decoder(kind: type[_T] | Any, dec_hook: DecHook = None) -> msgspec.msgpack.Decoder[_T]:
    """Return a decoder of msgpack that any thread may use."""
    with _describing:
        return msgspec.msgpack.Decoder(kind, dec_hook=dec_hook)


def json_decoder(kind: type[_T] | Any, dec_hook: DecHook = None) -> msgspec.json.Decoder[_T]:
    """Return a decoder of JSON that any thread may use."""
    with _describing:
        return msgspec.json.Decoder(kind, dec_hook=dec_hook)


def converter(kind: type[_T]) -> Callable[[Any], _T]:
    """Return a function that converts plain data, and that any thread may use. It raises ValidationError."""
    # Describes the type under the lock, so that every conversion finds it complete.
    msgpack_decoder(kind)
    return partial(msgspec.convert, type=kind)


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
