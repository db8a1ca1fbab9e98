"""Reduces a grammar to its constraints before it is sent to workers, which measure and compile only these."""

from contract.errors import InvalidRequestError
from contract.json_schema import plain_schema
from contract.sampling import MAX_GRAMMAR_BYTES, Grammar

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Size limit of a JSON schema with its annotations."""


def reduced(grammar: Grammar) -> Grammar:
    """Return the grammar without parts that do not constrain the answer.

    Raises InvalidRequestError about ``grammar`` for a schema that is longer than ``MAX_SCHEMA_BYTES``, is not valid, or has
    unsupported constraints.
    """
    if grammar.kind != "json_schema":
        return grammar
    num_bytes = len(grammar.text.encode(errors="surrogatepass"))
    if num_bytes > MAX_SCHEMA_BYTES:
        raise InvalidRequestError(
            f"the schema has {num_bytes} bytes with its annotations; the limit is {MAX_SCHEMA_BYTES}",
            param="grammar",
        )
    return Grammar("json_schema", plain_schema(grammar.text))
