"""A request's JSON body, read field by field; what is wrong with a field is said by its name."""

import reprlib
from collections.abc import Callable
from typing import Any

from aiohttp import web

from contract.errors import InvalidRequestError, UnsupportedMediaTypeError
from router.http.decoding import decode
from router.http.raw_body import BodyReader

Json = dict[str, Any]
UNSERVED = "x-unserved"
"""Marks the schema of a field that is known, and refused (``router.http.fields``)."""

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


async def read_body(
    request: web.Request, reader: BodyReader, max_values: int, schema: Json, hold: Callable[[int], object]
) -> "Body":
    """Return the JSON object of a POST, whose fields ``schema`` describes.

    hold: is called with the number of the body's bytes, and may raise OverloadedError.
    Raises UnsupportedMediaTypeError, PayloadTooLargeError, OverloadedError, InvalidRequestError.
    """
    if request.content_type != "application/json":
        given = request.headers.get("Content-Type") or "missing"
        raise UnsupportedMediaTypeError(f"the content type is {given[:100]}; send application/json")
    with reader.reading() as body:
        raw = await body.read(request)
        hold(len(raw))
        async with reader.turn(len(raw)):
            return await decode_body(raw, max_values, schema)


async def decode_body(raw: bytes, max_values: int, schema: Json) -> "Body":
    """Return the JSON object in ``raw``, whose fields ``schema`` describes.

    max_values: values in it at most. Raises PayloadTooLargeError, InvalidRequestError.
    """
    data = await decode(raw, max_values)
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return Body(data, schema)


class Body:
    """The fields of one request. Every getter gives the default for a field that is missing or null.

    schema: describes them (``router.http.schema``); a getter of another field raises LookupError, which is a bug. None
    describes none, and lets all be read.
    """

    def __init__(self, fields: dict[str, Any], schema: Json | None = None) -> None:
        self.fields = fields
        self.schema = schema or {}

    def get(self, name: str) -> Any:
        """The field as it is; None where it is missing."""
        if self.schema and UNSERVED in self.schema["properties"].get(name, (UNSERVED,)):
            raise LookupError(f"{name} is read, and router/http/schema.py does not describe it")
        return self.fields.get(name)

    def integer(self, name: str) -> int | None:
        """A whole number."""
        value = self.get(name)
        if value is not None and type(value) is not int:
            raise _wrong(name, value, "an integer")
        return value

    def integer_within(self, name: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``."""
        value = self.integer(name)
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must lie in {low}..{high}", param=name)
        return value

    def number(self, name: str) -> float | None:
        """A number."""
        value = self.get(name)
        if value is not None and type(value) not in (int, float):
            raise _wrong(name, value, "a number")
        try:
            return value if value is None else float(value)
        except OverflowError as error:
            raise _wrong(name, value, "a number of at most 64 bits") from error

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise _wrong(name, value, "true or false")
        return default if value is None else bool(value)

    def string(self, name: str) -> str | None:
        """A string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(name, value, "a string or a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise _wrong(name, value, "a list of integers")
        return tuple(value)

    def object(self, name: str) -> "Body":
        """An object."""
        value = self.get(name)
        schema = self.schema.get("properties", {}).get(name, {})
        schema = schema if "properties" in schema else None
        if value is None:
            return Body({}, schema)
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return Body(value, schema)


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    shown = _SHOWN.repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidRequestError(f"{name} is {shown}; it must be {wanted}", param=name)
