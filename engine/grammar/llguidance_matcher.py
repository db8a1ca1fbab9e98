"""Build llguidance's matcher of a grammar of any kind."""

import re
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLTokenizer

from contract.errors import InvalidRequestError
from contract.json_schema import plain_schema
from contract.sampling import Grammar
from engine.grammar.gbnf import gbnf_to_lark
from engine.grammar.json_schema import with_closed_objects
from engine.grammar.lark import with_plain_schemas
from engine.grammar.limits import GRAMMAR_LIMITS
from engine.grammar.matcher import reason_of
from engine.grammar.name_patterns import with_patterns_of_other_names
from engine.grammar.schema_faults import placed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
"""A space, or a new line with indentation. Otherwise a model that has never written JSON adds spaces for ever."""
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
        case "ebnf":
            return _guessed_form(grammar.text)


def _settled_schema(text: str) -> str:
    """Return the schema as the library gets it. Raises InvalidRequestError."""
    plain = plain_schema(text)
    closed = "{}" if plain == "true" else with_closed_objects(plain)
    return with_patterns_of_other_names(closed)


def _guessed_form(text: str) -> str:
    """Return the form of a grammar whose syntax is not named: GBNF where it is GBNF, else Lark.

    No text is both: each rule of GBNF holds ``::=`` behind its name, which no rule of Lark may.
    """
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except InvalidRequestError:
        if _GBNF_RULE.search(text):
            raise
    return LLMatcher.grammar_from_lark(with_plain_schemas(text))


def _library_schema(schema: str) -> str:
    options = _JSON if schema.startswith("{") else None  # not for false, which has nowhere to keep them
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)
