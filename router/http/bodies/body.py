"""The fields of a request's JSON body, read one by one; an error names the field."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from contract.errors import InvalidRequestError

Json = dict[str, Any]
UNSERVED = "x-unserved"
"""Marks the schema of a field that is known but rejected (``router.http.fields.unsupported``)."""
_NOT_DESCRIBED = (UNSERVED,)

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 60


class Body:
    """The fields of one request. Every getter returns the default for a field that is missing or null.

    Most bodies have few of the fields that are read, so getters look for the name first.
    Getters raise InvalidRequestError for a value of another type.
    schema: describes the fields (``router.http.schema``); reading a field that it does not describe is a bug and raises
    LookupError if the client has sent it. None: every field may be read.
    """

    def __init__(self, fields: dict[str, Any], schema: Json | None = None) -> None:
        self.fields = fields
        self.is_strict = False
        """True if the service runs with ``strict_api``; set by the reader of bodies."""
        self._described: Json = schema["properties"] if schema else {}

    def get(self, name: str) -> Any:
        """Return the value as it is; None if the field is missing."""
        value = self.fields.get(name)
        # else a field could be read that strict_api rejects and /openapi.json hides
        if value is not None and self._described and UNSERVED in self._described.get(name, _NOT_DESCRIBED):
            raise LookupError(f"{name} is read, but router/http/schema does not describe it")
        return value

    def given(self, readers: Mapping[str, "Reader"]) -> dict[str, Any]:
        """Return the values of those fields in ``readers`` that are not null, each as its reader returns it."""
        return {
            name: readers[name](self, name)
            # over the body, which has few fields of the many that could be read
            for name, value in self.fields.items()
            if value is not None and name in readers
        }

    def integer(self, name: str) -> int | None:
        """Return an integer."""
        if name not in self.fields:
            return None
        value = self.get(name)
        # not isinstance, by which ``true`` would be an integer
        if value is not None and type(value) is not int:
            raise _wrong(name, value, "an integer")
        return value

    def integer_within(self, name: str, low: int, high: int) -> int | None:
        """Return an integer in ``low``..``high``."""
        if name not in self.fields:
            return None
        value = self.integer(name)
        if value is not None and not low <= value <= high:
            raise InvalidRequestError(f"{name} is {value}; it must lie in {low}..{high}", param=name)
        return value

    def number(self, name: str) -> float | None:
        """Return a number."""
        value = self.get(name)
        if value is not None and type(value) not in (int, float):
            raise _wrong(name, value, "a number")
        try:
            return value if value is None else float(value)
        # integers of JSON have any number of digits
        except OverflowError as error:
            raise _wrong(name, value, "a number of at most 64 bits") from error

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        if name not in self.fields:
            return default
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise _wrong(name, value, "true or false")
        return default if value is None else bool(value)

    def string(self, name: str) -> str | None:
        """Return a string."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, value, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        """Return the strings of a field that is one string or a list of strings."""
        value = self.get(name)
        if value is None:
            return ()
        if isinstance(value, str):
            return (value,)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(name, value, "a string or a list of strings")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise _wrong(name, value, "a list of integers")
        return tuple(value)

    def object(self, name: str) -> "Body":
        """Return an object, with its own schema if there is one."""
        value = self.get(name)
        schema = self._described.get(name, {})
        schema = schema if "properties" in schema else None
        if value is None:
            return Body({}, schema)
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        return Body(value, schema)


Reader = Callable[[Body, str], Any]
"""Returns the value of a field of a body. Raises InvalidRequestError."""


def _wrong(name: str, value: Any, wanted: str) -> InvalidRequestError:
    # the value is the client's and may be of any size
    shown = _SHOWN.repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidRequestError(f"{name} is {shown}; it must be {wanted}", param=name)
