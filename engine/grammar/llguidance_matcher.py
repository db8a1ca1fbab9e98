"""Build llguidance's matcher of a grammar of any kind."""

import re
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

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: "JsonCompileOptions" = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
"""A space, or a new line with indentation. Otherwise a model that has never written JSON adds spaces for ever."""
_OUR_REASONS = {
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf can be held only where no value matches two of its branches, as their types, constants or required "
        "properties show; write anyOf"
    )
}
_OUR_LINE = re.compile(r"\n[ 0-9]*\| %llguidance [^\n]*")
_GBNF_RULE = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)


def build_matcher(grammar: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """Return the library's matcher at the start of the grammar. Raises InvalidRequestError with the library's reason."""
    try:
        machine = LLMatcher(vocabulary, _llguidance_text(grammar), log_level=0, limits=GRAMMAR_LIMITS)
    except ValueError as error:
        raise _not_compiled(grammar, str(error)) from error
    if machine.is_error():
        raise _not_compiled(grammar, reason_of(machine))
    return machine


def _not_compiled(grammar: Grammar, reason: str) -> InvalidRequestError:
    reason = _OUR_REASONS.get(reason, _OUR_LINE.sub("", reason))
    return InvalidRequestError(f"the {grammar.kind} does not compile: {reason}", param="grammar")


def _llguidance_text(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            plain = plain_schema(grammar.text)
            closed = "{}" if plain == "true" else with_closed_objects(plain)
            return _library_schema(with_patterns_of_other_names(closed))
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
