"""Build llguidance's matcher of a grammar of any kind, and name the part of a JSON schema that does not compile.

The objects of a JSON schema are closed first: an answer may only have properties that are named or match a pattern. JSON
Schema allows further properties if ``additionalProperties`` is missing. Authors of schemas seldom mean that, and a small
model invents properties. XGrammar and outlines close objects as well; OpenAI requires the field. Schemas within Lark
grammars (``%json {...}``) are treated like all others.
"""

import json
import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from contract.errors import InvalidRequestError
from contract.json_schema import parts_of, plain_schema, plain_schemas, schemas_within
from contract.sampling import Grammar
from contract.schema_constraints import Pointer, shown_pointer
from contract.schema_values import Schema
from engine.grammar.gbnf import gbnf_to_lark
from engine.grammar.machine import GRAMMAR_LIMITS
from engine.grammar.matcher import reason_of
from engine.grammar.name_patterns import with_patterns_of_other_names

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

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
_Schema = dict[str, Any]
_OWN_RULES = {"properties", "patternProperties", "required", "minProperties", "maxProperties"}
_OTHERS_RULES = {"anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas"}
_SAYS_IT = {"additionalProperties", "unevaluatedProperties", "minProperties"}
# Texts and patterns that do not end are taken as far as their line goes, so that no character is looked at twice.
_DIRECTIVES = re.compile(
    r"""\"(?:[^"\\\n]|\\.)*+\"? | //[^\n]* | \#[^\n]* | /(?:[^/\\\n]|\\.)++/? | (?P<json>%json\s*+)(?=\{)
    | (?P<unbounded>& | ~(?!\s*[0-9]))""",
    re.VERBOSE,
)
# Otherwise the library takes as much text at once as can follow in one way only, which may have no end: it then never
# returns (``start: A B``, ``A: /a+/``, ``B: /a/``). The last such line counts.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
# A space, or a new line with indentation. Otherwise a model that has never written JSON adds spaces for ever.
_JSON: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
_OUR_LINE = re.compile(r"\n[ 0-9]*\| %llguidance [^\n]*")
_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


def build_matcher(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """Return the library's matcher at the start of the grammar. Raises InvalidRequestError with the library's reason.

    The reason for a JSON schema names the part of it that is at fault.
    """
    try:
        found = _compiled(_llguidance_text(grammar), vocabulary)
    except ValueError as error:
        found = str(error)
    if isinstance(found, LLMatcher):
        return found
    reason = _OUR_LINE.sub("", found)
    if grammar.kind == "json_schema":
        reason = placed(reason, _settled_schema(grammar.text), partial(_reason, vocabulary))
    raise InvalidRequestError(f"the {grammar.kind} does not compile: {reason}", param="grammar")


def _compiled(text: str, vocabulary: LLTokenizer) -> LLMatcher | str:
    """Return the matcher of a grammar in the library's syntax, or the reason for which there is none."""
    try:
        machine = LLMatcher(vocabulary, text, log_level=0, limits=GRAMMAR_LIMITS)
    except ValueError as error:
        return str(error)
    return reason_of(machine) if machine.is_error() else machine


def _reason(vocabulary: LLTokenizer, schema: str) -> str | None:
    """Return the reason for which a settled schema does not compile; None if it does."""
    try:
        found = _compiled(_library_schema(schema), vocabulary)
    except ValueError as error:
        return str(error)
    return found if isinstance(found, str) else None


def _llguidance_text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return _library_schema(_settled_schema(grammar.text))
        case "json_object":
            return _library_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            choices: list[str] = msgspec.json.decode(grammar.text)
            return LLMatcher.grammar_from_regex("|".join(map(re.escape, choices)))
        case "gbnf":
            return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
        case "lark":
            return LLMatcher.grammar_from_lark(with_plain_schemas(grammar.text))
        case "ebnf":  # the syntax is not named: GBNF where it is GBNF, else Lark
            try:
                return LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text))
            except InvalidRequestError:
                # No text is both: each rule of GBNF holds ``::=`` behind its name, which no rule of Lark may.
                if _GBNF_RULE.search(grammar.text):
                    raise
            return LLMatcher.grammar_from_lark(with_plain_schemas(grammar.text))


def _settled_schema(text: str) -> str:
    """Return the schema as the library gets it. Raises InvalidRequestError."""
    plain = plain_schema(text)
    closed = "{}" if plain == "true" else with_closed_objects(plain)
    return with_patterns_of_other_names(closed)


def _library_schema(schema: str) -> str:
    options = _JSON if schema.startswith("{") else None  # not for false, which has nowhere to keep them
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


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
    for each in schemas_within(root):
        reference = each.get("$ref", _REFERENCES[0])
        if not (isinstance(reference, str) and reference.startswith(_REFERENCES)):
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
            # The whole fails because of this part if the reasons agree, or if it is the required property.
            missing = _NO_PROPERTY.fullmatch(reason)
            is_cause = own == reason or (missing is not None and place == ("properties", missing[1]))
            if own is not None and is_cause:
                at, schema, reason = (*at, *place), part, own
                break
        else:
            return at, reason


def with_closed_objects(text: str) -> str:
    """Return the schema with objects closed that name properties or patterns, except by ``additionalProperties``.

    Every match of the result matches ``text``. These stay unchanged: an object composed of several schemas, since each
    would forbid the others' properties; a schema with a remaining oneOf, which more values would match if its branches were
    closed; and text that is no JSON.
    """
    try:
        root = json.loads(text)
        schemas = list(schemas_within(root))
        for schema in schemas:
            parts = schema.get("allOf")
            # The parts that can constrain the properties of one object.
            num_rules = len(parts) if isinstance(parts, list) else 0
            num_rules += len(_OTHERS_RULES & schema.keys()) + bool(_OWN_RULES & schema.keys())
            if num_rules > 1 or "oneOf" in schema:
                return text
        for schema in filter(_is_open, schemas):
            schema["additionalProperties"] = False
        return json.dumps(root)
    except (ValueError, RecursionError):
        return text


def _is_open(schema: _Schema) -> bool:
    named = schema.get("properties")
    required = schema.get("required", [])
    if named is None and schema.get("patternProperties"):
        named = {}
    if not isinstance(named, dict) or not isinstance(required, list) or _SAYS_IT & schema.keys():
        return False
    return all(isinstance(name, str) and name in named for name in required)


def with_plain_schemas(text: str) -> str:
    """Return the grammar with each inline schema reduced to its constraints.

    Raises InvalidRequestError about ``grammar`` for an empty grammar, for a constraint that cannot be enforced, and for
    intersected or negated terminals: the library searches a text that matches them, without a bound.
    """
    if not text.strip():
        raise InvalidRequestError("the grammar is empty", param="grammar")
    between = []
    schemas = []
    start = 0
    end = 0
    while match := _DIRECTIVES.search(text, end):
        end = match.end()
        if match["unbounded"]:
            raise InvalidRequestError(
                f"the lark does not compile: {match[0]} between terminals is not served, since what it costs has no bound",
                param="grammar",
            )
        if match["json"]:
            try:
                _, length = json.JSONDecoder().raw_decode(text[end:])
            except (ValueError, RecursionError):
                break  # the library reports where
            between.append(text[start:end])
            schemas.append(text[end : end + length])
            start = end = end + length
    plain = map(with_patterns_of_other_names, plain_schemas(schemas))
    return (
        "".join(part for pair in zip(between, plain, strict=True) for part in pair)
        + text[start:]
        + _NO_FORCING
    )
