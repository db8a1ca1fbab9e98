"""Grammars as they travel to workers: reduced to what constrains an answer, since only that is measured and compiled."""

from contract.errors import InvalidRequestError
from contract.json_schema import plain_schema
from contract.requests import MAX_GRAMMAR_BYTES, Grammar

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Of a JSON schema with its annotations."""


def reduced(grammar: Grammar) -> Grammar:
    """Return the same grammar without what does not matter to it.

    Raises InvalidRequestError about ``grammar`` for a schema that is longer than ``MAX_SCHEMA_BYTES``, is none, or has
    constraints that cannot be held.
    """
    if grammar.kind != "json_schema":
        return grammar
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(
            f"the schema has {num_bytes} bytes with its annotations; it may have {MAX_SCHEMA_BYTES} at most",
            param="grammar",
        )
    return Grammar("json_schema", plain_schema(grammar.text))
