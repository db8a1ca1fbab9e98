"""Unions (``oneOf``) whose branches no value matches two of, so that they mean the same as ``anyOf``."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from contract.schema_values import Schema, canonical, properties_of, required_of, types_of, values_of

Resolve = Callable[[Any], Any]
MAX_STEPS = 2**19
"""Schemas, values and names that are looked at in one document; what would take more is not told apart."""
_MAX_DEPTH = 8
_SAYS_ITSELF = frozenset(("type", "const", "enum", "properties"))


class TooManyStepsError(Exception):
    """The union is too large to find out."""


class Unions:
    """Tells the branches of one document apart by their types, constants and properties.

    resolve: follows a schema's references. max_steps: what all questions may cost together; beyond that nothing is known.
    """

    def __init__(self, resolve: Resolve, max_steps: int = MAX_STEPS) -> None:
        self._resolve = resolve
        self._steps_left = max_steps

    def are_apart(self, branches: Sequence[Any]) -> bool:
        """Whether no value matches two of them, as far as they show."""
        try:
            return self._are_apart(branches, 0)
        except TooManyStepsError:
            return False

    def tell_apart(self, union: Schema) -> None:
        """Require, in each branch that is an object, the one property by which all of these can be told apart.

        So it is meant where a discriminator is named, and where a library leaves properties with a default out of
        ``required``. Branches that are apart already, or cannot be told apart so, are left as they are.
        """
        branches = union.get("oneOf")
        if not isinstance(branches, list) or self.are_apart(branches):
            return
        try:
            objects = [one for one in self._flat(branches, 0) if _may_be_object(one)]
            name = next(self._discriminators(union, objects), None)
        except TooManyStepsError:
            return
        for one in objects if name is not None else ():
            if name not in required_of(one):
                one["required"] = [*required_of(one), name]

    def _are_apart(self, branches: Sequence[Any], depth: int) -> bool:
        known = self._flat(branches, depth)
        by_type: dict[str, list[Any]] = {}
        for one in known:
            for name in types_of(one) if isinstance(one, dict) else types_of({}):
                by_type.setdefault(name, []).append(one)
        return all(
            len(those) < 2
            or self._are_values_apart(those)
            or (name == "object" and self._has_sign(those, depth))
            for name, those in by_type.items()
        )

    def _flat(self, branches: Sequence[Any], depth: int) -> list[Any]:
        """Return the branches resolved, and those within unions among them, without those that nothing matches."""
        out = []
        waiting = [(one, depth) for one in reversed(branches)]
        while waiting:
            self._step()
            one, level = waiting.pop()
            one = self._resolve(one)
            inner = _branches_within(one)
            if inner is not None and level < _MAX_DEPTH:
                waiting += [(part, level + 1) for part in reversed(inner)]
            elif one is not False:
                out.append(one)
        return out

    def _are_values_apart(self, schemas: list[Any]) -> bool:
        seen: set[str] = set()
        for schema in schemas:
            values = values_of(schema) if isinstance(schema, dict) else None
            if values is None:
                return False
            self._step(len(values))
            own = {canonical(value) for value in values}
            if own & seen:
                return False
            seen |= own
        return True

    def _have_signs(self, schemas: list[Any], depth: int) -> bool:
        """Whether one property tells all of them apart, or in each pair some property does."""
        return self._has_sign(schemas, depth) or (
            len(schemas) > 2 and all(self._has_sign(list(pair), depth) for pair in combinations(schemas, 2))
        )

    def _has_sign(self, schemas: list[Any], depth: int) -> bool:
        """Whether one property that all of them require tells them apart."""
        self._step(len(schemas))
        if not all(map(_may_be_object, schemas)):
            return False
        return any(all(name in required_of(one) for one in schemas) for name in self._signs(schemas, depth))

    def _discriminators(self, union: Schema, objects: list[Schema]) -> Iterator[str]:
        """Yield the names of properties that would tell all branches apart if they were required."""
        found = union.get("discriminator")
        named = found.get("propertyName") if isinstance(found, dict) else None
        signs = list(self._signs(objects, 0)) if len(objects) > 1 else []
        yield from sorted(signs, key=lambda name: name != named)

    def _signs(self, schemas: list[Any], depth: int) -> Iterator[str]:
        """Yield the names of properties of all of them whose values are apart."""
        first, *others = [properties_of(one) for one in schemas]
        if depth >= _MAX_DEPTH or len({id(one) for one in schemas}) < len(schemas):
            return
        for name in first:
            self._step(len(schemas))
            if all(name in one for one in others) and self._are_apart(
                [one[name] for one in (first, *others)], depth + 1
            ):
                yield name

    def _step(self, count: int = 1) -> None:
        self._steps_left -= count
        if self._steps_left < 0:
            raise TooManyStepsError


def _branches_within(schema: Any) -> list[Any] | None:
    """Return the branches of a schema that is a union and nothing else."""
    if not isinstance(schema, dict) or _SAYS_ITSELF & schema.keys():
        return None
    given = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    parts = schema.get("allOf")
    if not given and isinstance(parts, list) and len(parts) == 1:
        return parts
    return given[0] if given else None


def _may_be_object(schema: Any) -> bool:
    return isinstance(schema, dict) and "object" in types_of(schema)
