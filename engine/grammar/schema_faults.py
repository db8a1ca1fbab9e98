"""Find the part of a JSON schema for which the library does not compile it."""

import json
import re
import time
from collections.abc import Callable

from contract.json_schema import parts_of, schemas_within
from contract.schema_constraints import Pointer, shown_pointer
from contract.schema_values import Schema

_MAX_SECONDS = 0.5
_DEFINITIONS = ("$defs", "definitions")
_REFERENCES = tuple(f"#/{name}/" for name in _DEFINITIONS)
_NOT_DISJOINT = re.compile("patternProperty regexes /(.*)/ and /(.*)/ are not disjoint", re.DOTALL)
_NO_PROPERTY = re.compile("Unsatisfiable schema: required property '(.*)' is unsatisfiable", re.DOTALL)
_OUR_REASONS = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf can be held only where no value matches two of its branches, as their types, constants or required "
        "properties show; write anyOf"
    )
}
Compile = Callable[[str], str | None]
"""Returns the library's reason for which it does not compile a schema; None if it does."""


def placed(reason: str, text: str, reason_of: Compile) -> str:
    """Return the reason in our words, behind the place of the smallest part that does not compile for the same reason.

    text: the whole schema, which the library does not compile. The search ends after ``_MAX_SECONDS`` of processor time
    with the part that was found so far.
    """
    root = json.loads(text)
    if not isinstance(root, dict):
        return reason
    place, reason = _place_of(reason, root, reason_of)
    if found := _NOT_DISJOINT.fullmatch(reason):
        reason = f"a name may match both {found[1]!r} and {found[2]!r}, which is not served; let each name match one"
        place = (*place, "patternProperties")
    return f"{shown_pointer(place)}: {_OUR_REASONS.get(reason, reason)}"


def _place_of(reason: str, root: Schema, reason_of: Compile) -> tuple[Pointer, str]:
    """Return the place, and the reason there."""
    if not all(_leads_to_definition(schema) for schema in schemas_within(root)):
        return (), reason  # a part alone would lack what it refers to
    shared = {name: root[name] for name in _DEFINITIONS if name in root}
    end = time.thread_time() + _MAX_SECONDS
    at: Pointer = ()
    schema = root
    while True:
        for place, part in parts_of(schema):
            if time.thread_time() > end:
                return at, reason
            own = reason_of(json.dumps({**shared, **part})) if isinstance(part, dict) else None
            if own is not None and _is_because(reason, own, place):
                at, schema, reason = (*at, *place), part, own
                break
        else:
            return at, reason


def _is_because(reason: str, own: str, place: Pointer) -> bool:
    """Return True if a schema does not compile because a part of it, at ``place``, does not, for a reason of its own."""
    found = _NO_PROPERTY.fullmatch(reason)
    return own == reason or (found is not None and place == ("properties", found[1]))


def _leads_to_definition(schema: Schema) -> bool:
    reference = schema.get("$ref", _REFERENCES[0])
    return isinstance(reference, str) and reference.startswith(_REFERENCES)
