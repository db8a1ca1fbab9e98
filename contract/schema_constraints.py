"""The constraints of one JSON schema: each is kept, tightened to what the grammar library supports, dropped or refused.

Patterns (ECMA 262) are translated to the library's syntax (Rust's regex crate). The two differ in classes, where ``[``,
``&&``, ``--`` and ``~~`` have a meaning in Rust, in braces that are not a count, and in a few escapes. Parts that an
automaton or this translation does not support are named in an error.
"""

import re
from collections.abc import Iterator

from contract.errors import InvalidRequestError
from contract.schema_unions import Unions
from contract.schema_values import TYPES, References, Schema, properties_of, required_of, spelled, types_of

Pointer = tuple[str, ...]

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Formats that are enforced; others are annotations."""
MAX_BOUND = 2**63 - 1024
"""The largest bound that the library supports and a double represents exactly."""
MIN_BOUND = 1e-30
"""The smallest bound above 0 that the library supports."""
UPPER = ("maximum", "exclusiveMaximum")
LOWER = ("minimum", "exclusiveMinimum")
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_UNSUPPORTED = frozenset(
    "not if dependentRequired dependentSchemas dependencies uniqueItems contains propertyNames unevaluatedProperties "
    "unevaluatedItems $dynamicRef $recursiveRef disallow extends divisibleBy".split()
)
_IN_PLACE = frozenset(("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties"))
_CHARACTER = r"\\[pPux]\{[^{}]*+\} | \\c[A-Za-z] | \\x[0-9A-Fa-f]{2} | \\u[0-9A-Fa-f]{4}"
_PARTS = re.compile(
    rf"""(?P<character>{_CHARACTER} | \\0(?![0-9])) | (?P<escape>\\.) | (?P<open>\[\^?)
    | (?P<group>\(\?(?:<?[=!]|>|\#|\(|P=|P>|&|R)) | (?P<count>\{{[0-9]++(?:,[0-9]*+)?\}}) | (?P<brace>\{{)
    | (?P<plain>[^\\\[({{]++|.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_CLASS = re.compile(
    rf"(?P<set>\\[dDsSwW] | \\[pP]\{{[^{{}}]*+\}}) | {_CHARACTER} | \\. | .", re.VERBOSE | re.DOTALL
)
# Escapes for look-around or back-references, and escapes that ECMA 262 does not define.
_UNSUPPORTED_ESCAPES = frozenset("bBkGKEQRXhHN123456789")
# Python's escape for the end of the text, and a literal of ECMA that means the end of a word in Rust.
_OTHERS = {"\\Z": "\\z", "\\<": "<", "\\>": ">"}


_IN_RUST = {"\\0": "\\x00", "\\b": "\\x08", **{one: f"\\{one}" for one in "[&~^-"}}
"""Escapes within a class; the zero everywhere."""


class Constraints:
    """Decides about the constraints of the schemas of one document.

    is_lenient: unsupported constraints are dropped instead of refused.
    """

    def __init__(self, references: References, unions: Unions, *, is_lenient: bool) -> None:
        self._references = references
        self._unions = unions
        self._is_lenient = is_lenient

    def settle(self, schema: Schema, out: Schema, at: Pointer) -> None:
        """Keep, tighten, drop or refuse each constraint of ``out``, the reduced form of ``schema`` at ``at``."""
        self._refuse(schema, out, at)
        self._settle_types(out, at)
        self._settle_bounds(out, at)
        _drop_what_forbids_nothing(out)
        self._settle_patterns(out, at)
        self._refuse_counts(out, at)
        self._settle_one_of(out)
        reference = out.get("$ref")
        if self._is_lenient and isinstance(reference, str) and not self._references.lead_within(reference):
            del out["$ref"]

    def _refuse(self, schema: Schema, out: Schema, at: Pointer) -> None:
        """Raise InvalidRequestError for an unsupported constraint, unless it forbids nothing or may be dropped."""
        if (
            schema.get("unevaluatedProperties") is False
            and "additionalProperties" not in schema
            and not (_IN_PLACE & schema.keys())
            and not ((_UNSUPPORTED - {"unevaluatedProperties"}) & schema.keys())
        ):  # unevaluatedProperties is equal to additionalProperties, and the schema has nothing else that is unsupported
            out["additionalProperties"] = False
            return
        for key in schema:
            if key in _UNSUPPORTED and not self._forbids_nothing(key, schema) and not self._is_lenient:
                raise wrong_schema(
                    f"{shown_pointer((*at, key))}: the constraint {key} is not supported; remove it"
                )

    def _forbids_nothing(self, key: str, schema: Schema) -> bool:
        if key != "not":
            return _forbids_nothing(key, schema)
        others = {name: value for name, value in schema.items() if name != "not"}
        return self._unions.are_disjoint([others, schema["not"]])

    def _settle_types(self, out: Schema, at: Pointer) -> None:
        if "type" not in out:
            return
        given = out["type"] if isinstance(out["type"], list) else [out["type"]]
        if all(isinstance(one, str) and one in TYPES for one in given):
            return
        if not self._is_lenient:
            raise wrong_schema(
                f"{shown_pointer((*at, 'type'))}: {str(out['type'])[:40]!r} is not a type of JSON Schema"
            )
        types = [spelled(one) if isinstance(one, str) else "" for one in given]
        del out["type"]
        if all(one in TYPES for one in types):
            out["type"] = types if len(types) > 1 else types[0]

    def _settle_bounds(self, out: Schema, at: Pointer) -> None:
        for key in COUNTS:
            value = out.get(key)
            if isinstance(value, float) and value.is_integer():
                out[key] = int(value)
        for key in (*UPPER, *LOWER):
            value = out.get(key)
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            bound = _supported_bound(value, is_upper=key in UPPER, is_integer=out.get("type") == "integer")
            if bound is not None:
                out[key] = bound
            elif self._is_lenient:
                del out[key]
            else:
                raise wrong_schema(
                    f"{shown_pointer((*at, key))}: bounds must lie between -{MAX_BOUND} and {MAX_BOUND}"
                )

    def _settle_patterns(self, out: Schema, at: Pointer) -> None:
        """Translate patterns to the library's syntax."""
        key = "pattern"
        patterns = out.get("patternProperties")
        try:
            if isinstance(out.get(key), str):
                out[key] = rust_pattern(out[key])
            key = "patternProperties"
            if isinstance(patterns, dict):
                out[key] = {rust_pattern(pattern): one for pattern, one in patterns.items()}
        except UnsupportedPatternError as error:
            if not self._is_lenient:
                raise wrong_schema(
                    f"{shown_pointer((*at, key))}: {error} in a pattern is not supported; remove it"
                ) from error
            del out[key]
            if key == "patternProperties":
                # Without the patterns it would forbid the names that they allow.
                out.pop("additionalProperties", None)
            self._settle_patterns(out, at)

    def _refuse_counts(self, out: Schema, at: Pointer) -> None:
        """Refuse counts of properties unless all named properties are required: the library cannot enforce others."""
        if properties_of(out).keys() <= required_of(out):
            return
        for key in ("minProperties", "maxProperties"):
            if key in out and self._is_lenient:
                del out[key]
            elif key in out:
                raise wrong_schema(
                    f"{shown_pointer((*at, key))}: {key} is not supported with properties that are not required; remove it"
                )

    def _settle_one_of(self, out: Schema) -> None:
        """Turn oneOf into anyOf if no value can match two of its branches."""
        branches = out.get("oneOf")
        if not isinstance(branches, list) or not (self._is_lenient or self._unions.are_disjoint(branches)):
            return
        del out["oneOf"]
        if "anyOf" not in out:
            out["anyOf"] = branches
        elif isinstance(out.get("allOf", []), list):
            out["allOf"] = [*out.get("allOf", []), {"anyOf": branches}]


def shown_pointer(at: Pointer) -> str:
    """Return a pointer as text for clients, shortened in the middle if it is long."""
    text = "#" + "".join(f"/{part}" for part in at)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-90:]}"


def wrong_schema(message: str) -> InvalidRequestError:
    """Return an error about the request's grammar."""
    return InvalidRequestError(message, param="grammar")


def _forbids_nothing(key: str, schema: Schema) -> bool:
    value = schema[key]
    match key:
        case "uniqueItems":
            return value in (False, None) or schema.get("maxItems") in (0, 1)
        case "if":
            return all(schema.get(branch, True) in (True, {}) for branch in ("then", "else"))
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value in ({}, None) or (
                isinstance(value, dict) and all(one in ([], {}, True) for one in value.values())
            )
        case "contains":
            return schema.get("minContains") == 0 and "maxContains" not in schema
        case "propertyNames" | "unevaluatedProperties" | "unevaluatedItems":
            return value is True or value == {}
    return False


def _drop_what_forbids_nothing(out: Schema) -> None:
    for key in ("minItems", "minLength", "minProperties"):
        if out.get(key) == 0:
            del out[key]
    if out.get("required") == []:
        del out["required"]
    if out.get("patternProperties") == {}:
        del out["patternProperties"]
    if "additionalItems" in out and not isinstance(out.get("items"), list):
        del out["additionalItems"]
    if "format" in out and (out["format"] not in FORMATS or "string" not in types_of(out)):
        del out["format"]
    # ``required`` may imply minProperties, and the named properties maxProperties.
    fewest = out.get("minProperties")
    if isinstance(fewest, int) and fewest <= len(required_of(out)):
        del out["minProperties"]
    most = out.get("maxProperties")
    is_closed = out.get("additionalProperties") is False and "patternProperties" not in out
    if isinstance(most, int) and is_closed and most >= len(properties_of(out)):
        del out["maxProperties"]


def _supported_bound(value: float, *, is_upper: bool, is_integer: bool) -> float | None:
    """Return the bound, or the next tighter one that the library supports; None if there is none."""
    if 0 < abs(value) < MIN_BOUND and is_upper == (value < 0):
        return MIN_BOUND if value > 0 else -MIN_BOUND
    if abs(value) <= MAX_BOUND:
        return value
    if is_upper != (value > 0):
        return None
    if is_integer and is_upper:
        return 2**63 - 1
    return MAX_BOUND if value > 0 else -MAX_BOUND


class UnsupportedPatternError(Exception):
    """An unsupported part of a pattern; it is the error's text."""


def rust_pattern(pattern: str) -> str:
    """Return the pattern in the library's syntax. Raises UnsupportedPatternError."""
    return "".join(_rust_parts(pattern))


def _rust_parts(pattern: str) -> Iterator[str]:
    position = 0
    while match := _PARTS.match(pattern, position):
        position = match.end()
        text = match[0]
        match match.lastgroup:
            case "group":
                raise UnsupportedPatternError(text)
            case "escape" if text[1] in _UNSUPPORTED_ESCAPES:
                raise UnsupportedPatternError(text)
            case "escape":
                yield _OTHERS.get(text, text)
            case "brace":
                yield "\\{"
            case "open":
                inner, position = _class_from(pattern, position)
                is_negated = text.endswith("^")
                yield f"[{'^' * is_negated}{inner}]" if inner else "[\\s\\S]" if is_negated else "[^\\s\\S]"
            case kind:
                yield _plain(text) if kind == "character" else text


def _class_from(pattern: str, start: int) -> tuple[str, int]:
    """Return the items of a class and its end. Raises UnsupportedPatternError if it has no end."""
    out: list[str] = []
    position = start
    is_range = False
    while (match := _IN_CLASS.match(pattern, position)) and match[0] != "]":
        position = match.end()
        is_set = bool(match["set"])
        if is_range and is_set:  # as in [a-\d], where the hyphen stands for itself
            out[-1] = "\\-"
        out.append(_plain(match[0]))
        following = _IN_CLASS.match(pattern, position + 1)
        may_begin = not is_range and not is_set and pattern.startswith("-", position)
        is_range = may_begin and following is not None and following[0] != "]"
        if is_range:
            out.append("-")
            position += 1
    if match is None:
        raise UnsupportedPatternError("a class without an end")
    return "".join(out), position + 1


def _plain(text: str) -> str:
    """Return one character of a class, or an escape, in Rust's syntax."""
    if text.startswith("\\c"):
        return f"\\x{ord(text[-1]) % 32:02x}"
    return _IN_RUST.get(text, text)
