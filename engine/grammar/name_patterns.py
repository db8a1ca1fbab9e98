"""Remove the patterns of names that match no other names than ``properties`` and ``required`` list.

The library lets a named property match its own schema and that of each pattern, and excludes its name from the patterns. A
pattern that matches nothing else is then a key without any text: an answer that begins one cannot go on.
"""

import json
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from contract.errors import InvalidRequestError
from contract.json_schema import places_within
from contract.schema_constraints import Pointer, shown_pointer
from engine.grammar.machine import GRAMMAR_LIMITS

_Schema = dict[str, Any]
_BYTES = LLTokenizer("byte")
_NUM_BYTES = 256
MAX_STEPS = 2**14
"""Characters of names that are compared with patterns in one document, some 50 µs each."""


def with_patterns_of_other_names(text: str) -> str:
    """Return an equal schema whose patterns all match names that neither ``properties`` nor ``required`` lists.

    Raises InvalidRequestError about ``grammar`` if that takes too many steps. Text that is no JSON stays unchanged.
    """
    try:
        root = json.loads(text)
        budget = _Budget()
        patterned = [
            place for place in places_within(root) if isinstance(place[1].get("patternProperties"), dict)
        ]
        for budget.at, schema in patterned:
            _settle(schema, budget)
        return json.dumps(root) if patterned else text
    except (ValueError, RecursionError):
        return text


class _Budget:
    """Counts the steps in one document. at: the place of the schema that they are for."""

    def __init__(self) -> None:
        self.at: Pointer = ()
        self._left = MAX_STEPS

    def step(self) -> None:
        """Count a step. Raises InvalidRequestError if there were too many."""
        self._left -= 1
        if self._left < 0:
            raise InvalidRequestError(
                f"{shown_pointer((*self.at, 'patternProperties'))}: its patterns list names one by one that properties has "
                f"as well, in more than {MAX_STEPS} characters; remove them from one of both",
                param="grammar",
            )


def _settle(schema: _Schema, budget: _Budget) -> None:
    """Remove patterns from one object's schema, and let the named properties match their schemas as well."""
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        return
    required = schema.get("required", [])
    required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    for pattern, value in list(schema["patternProperties"].items()):
        # A required name is one of its own for the library, too.
        names = _only_names(pattern, list(dict.fromkeys([*properties, *required])), budget)
        if names is None:
            continue
        del schema["patternProperties"][pattern]
        for name in names:
            both = [properties.get(name, {}), value]
            properties[name] = value if both[0] in (value, {}, True) else {"allOf": both}
            schema["properties"] = properties
    if not schema["patternProperties"]:
        del schema["patternProperties"]


def _only_names(pattern: str, names: list[str], budget: _Budget) -> list[str] | None:
    """Return the names that match the pattern if no other text does; None if others do, or it does not compile."""
    schema = {
        "patternProperties": {pattern: {"type": "null"}},
        "additionalProperties": False,
        "type": "object",
    }
    # without forcing, since each mask would look ahead through the whole rest of a name
    grammar = f'start: %json {json.dumps(schema)}\n%llguidance {{"no_forcing": true}}'
    machine = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=GRAMMAR_LIMITS)
    machine.try_consume_tokens(list(b"{"))
    by_key = {json.dumps(name, ensure_ascii=False).encode(): name for name in names}
    found: list[str] = []
    waiting = [(machine, list(by_key), 1)]
    is_first = True
    while waiting:
        machine, keys, length = waiting.pop()
        budget.step()
        allowed = _allowed_by(machine)
        if allowed is None:
            return None
        if is_first:
            allowed &= {ord('"')}
            is_first = False
        begun = {byte: [key for key in keys if key[length - 1] == byte] for byte in allowed}
        if not all(begun.values()):
            return None
        for byte, those in begun.items():
            if ends := [key for key in those if len(key) == length]:
                found.append(by_key[ends[0]])
            else:
                following = machine.deep_copy() if len(begun) > 1 else machine
                following.try_consume_tokens([byte])
                waiting.append((following, those, length + 1))
    return found


def _allowed_by(machine: LLMatcher) -> set[int] | None:
    """Return the bytes that may follow; None for a machine with an error."""
    if machine.is_error():
        return None
    bits = np.unpackbits(np.frombuffer(machine.compute_bitmask(), np.uint8), bitorder="little")
    return None if machine.is_error() else set(np.flatnonzero(bits[:_NUM_BYTES]).tolist())
