"""Treat schemas within Lark grammars (``%json {...}``) like all other schemas."""

import json
import re

from contract.errors import InvalidRequestError
from contract.json_schema import plain_schemas
from engine.grammar.name_patterns import with_patterns_of_other_names

_DIRECTIVES = re.compile(
    r"""\"(?:[^"\\\n]|\\.)*+\"? | //[^\n]* | \#[^\n]* | /(?:[^/\\\n]|\\.)++/? | (?P<json>%json\s*+)(?=\{)
    | (?P<unbounded>& | ~(?!\s*[0-9]))""",
    re.VERBOSE,
)
"""Texts and patterns that do not end are taken as far as their line goes, so that no character is looked at twice."""
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
"""Otherwise the library takes as much text at once as can follow in one way only, which may have no end: it then never
returns (``start: A B``, ``A: /a+/``, ``B: /a/``). The last such line counts."""


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
