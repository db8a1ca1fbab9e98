"""Finds unions (``oneOf``) with disjoint branches, which are therefore equal to ``anyOf``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from contract.schema_values import Schema, canonical, properties_of, required_of, types_of, values_of

Resolve = Callable[[Any], Any]
# Of the schemas, values and names examined in one document; unions beyond it do not count as disjoint.
MAX_STEPS = 2**19
_MAX_DEPTH = 8
_SAYS_ITSELF = frozenset(("type", "const", "enum", "properties"))


class TooManyStepsError(Exception):
    """The union is too large to be examined."""


class Unions:
    """Compares the branches of the unions in one document by their types, constants and properties.

    resolve: follows a schema's references. max_steps: limit of all examinations together.
    """

    def __init__(self, resolve: Resolve, max_steps: int = MAX_STEPS) -> None:
        self._resolve = resolve
        self._steps_left = max_steps

    def are_disjoint(self, branches: Sequence[Any]) -> bool:
        """Return True if it is certain that no value matches two of the branches."""
        try:
            return self._are_disjoint(branches, 0)
        except TooManyStepsError:
            return False

    def require_discriminator(self, union: Schema) -> None:
        """Require, in each branch that is an object, the one property that distinguishes all of them.

        A named discriminator means this, as do libraries that do not list properties with a default in ``required``.
        Branches that are disjoint already, or cannot be made so, are unchanged.
        """
        branches = union.get("oneOf")
        if not isinstance(branches, list) or self.are_disjoint(branches):
            return
        try:
            objects = [one for one in self._flat(branches, 0) if _may_be_object(one)]
            found = union.get("discriminator")
            named = found.get("propertyName") if isinstance(found, dict) else None
            # The properties that would distinguish all branches if they were required; the named one first.
            names = list(self._discriminating_names(objects, 0)) if len(objects) > 1 else []
            name = min(names, key=lambda name: name != named, default=None)
        except TooManyStepsError:
            return
        for one in objects if name is not None else ():
            if name not in required_of(one):
                one["required"] = [*required_of(one), name]

    def _are_disjoint(self, branches: Sequence[Any], depth: int) -> bool:
        known = self._flat(branches, depth)
        by_type: dict[str, list[Any]] = {}
        for one in known:
            for name in types_of(one) if isinstance(one, dict) else types_of({}):
                by_type.setdefault(name, []).append(one)
        return all(
            len(those) < 2
            or self._have_disjoint_values(those)
            or (name == "object" and self._has_discriminator(those, depth))
            for name, those in by_type.items()
        )

    def _flat(self, branches: Sequence[Any], depth: int) -> list[Any]:
        """Return the resolved branches, with nested unions flattened, without branches that match nothing."""
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

    def _have_disjoint_values(self, schemas: list[Any]) -> bool:
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

    def _has_discriminator(self, schemas: list[Any], depth: int) -> bool:
        """Return True if one property that all schemas require distinguishes them."""
        self._step(len(schemas))
        if not all(map(_may_be_object, schemas)):
            return False
        return any(
            all(name in required_of(one) for one in schemas)
            for name in self._discriminating_names(schemas, depth)
        )

    def _discriminating_names(self, schemas: list[Any], depth: int) -> Iterator[str]:
        """Yield the names of properties that all schemas have, with disjoint values."""
        first, *others = [properties_of(one) for one in schemas]
        # A branch that occurs twice is disjoint from nothing.
        if depth >= _MAX_DEPTH or len({id(one) for one in schemas}) < len(schemas):
            return
        for name in first:
            self._step(len(schemas))
            if all(name in one for one in others) and self._are_disjoint(
                [one[name] for one in (first, *others)], depth + 1
            ):
                yield name

    def _step(self, count: int = 1) -> None:
        self._steps_left -= count
        if self._steps_left < 0:
            raise TooManyStepsError


def _branches_within(schema: Any) -> list[Any] | None:
    """Return the branches of a schema that is only a union."""
    if not isinstance(schema, dict) or _SAYS_ITSELF & schema.keys():
        return None
    given = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    parts = schema.get("allOf")
    if not given and isinstance(parts, list) and len(parts) == 1:
        return parts
    return given[0] if given else None


def _may_be_object(schema: Any) -> bool:
    return isinstance(schema, dict) and "object" in types_of(schema)
