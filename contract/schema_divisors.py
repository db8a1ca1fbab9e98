"""Counts the remainders of a schema's divisors, for each of which the grammar library makes a state."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from contract.schema_values import Schema

MAX_DIVISORS = 20_000
"""Limit of the sum of all ``multipleOf``, in units of their last digits."""
_PARTS = frozenset(("$ref", "anyOf", "oneOf"))


def num_remainders(schemas: Sequence[Schema]) -> int:
    """Return the number of remainders of all divisors of these schemas, exact up to ``MAX_DIVISORS``."""
    divisors = {divisor for schema in schemas if (divisor := _divisor(schema.get("multipleOf")))}
    if not divisors:
        return 0
    exponent = min(0, *(_exponent(divisor) for divisor in divisors))
    num_states = sum(int(divisor.scaleb(-min(0, _exponent(divisor)))) for divisor in divisors)
    if num_states > MAX_DIVISORS or not any(map(_combines, schemas)):
        return num_states
    return max(num_states, math.lcm(*(int(divisor.scaleb(-exponent)) for divisor in divisors)))


def _combines(schema: Schema) -> bool:
    """Return True if several schemas in it constrain one value, so that their divisors multiply."""
    parts = schema.get("allOf")
    num_parts = len(parts) if isinstance(parts, list) else 0
    num_others = len(_PARTS & schema.keys())
    return num_parts + num_others + ("multipleOf" in schema) > 1 or "patternProperties" in schema


def _divisor(value: Any) -> Decimal | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return abs(Decimal(repr(value))).normalize() or None


def _exponent(number: Decimal) -> int:
    return int(number.as_tuple().exponent)
