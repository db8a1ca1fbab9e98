"""Close the objects of a JSON schema: an answer may only have properties that are named or match a pattern.

JSON Schema allows further properties if ``additionalProperties`` is missing. Authors of schemas seldom mean that, and a
small model invents properties. XGrammar and outlines close objects as well; OpenAI requires the field.
"""

import json
from typing import Any

from contract.json_schema import schemas_within

_Schema = dict[str, Any]
_OWN_RULES = {"properties", "patternProperties", "required", "minProperties", "maxProperties"}
_OTHERS_RULES = {"anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas"}
_SAYS_IT = {"additionalProperties", "unevaluatedProperties", "minProperties"}


def with_closed_objects(text: str) -> str:
    """Return the schema with objects closed that name properties or patterns, except by ``additionalProperties``.

    Every match of the result matches ``text``. These stay unchanged: an object composed of several schemas, since each
    would forbid the others' properties; a schema with a remaining oneOf, which more values would match if its branches were
    closed; and text that is no JSON.
    """
    try:
        root = json.loads(text)
        schemas = list(schemas_within(root))
        if any(_num_rules(schema) > 1 or "oneOf" in schema for schema in schemas):
            return text
        for schema in filter(_is_open, schemas):
            schema["additionalProperties"] = False
        return json.dumps(root)
    except (ValueError, RecursionError):
        return text


def _num_rules(schema: _Schema) -> int:
    """Count the parts that can constrain the properties of one object."""
    parts = schema.get("allOf")
    num_parts = len(parts) if isinstance(parts, list) else 0
    return num_parts + len(_OTHERS_RULES & schema.keys()) + bool(_OWN_RULES & schema.keys())


def _is_open(schema: _Schema) -> bool:
    named = schema.get("properties")
    required = schema.get("required", [])
    if named is None and schema.get("patternProperties"):
        named = {}
    if not isinstance(named, dict) or not isinstance(required, list) or _SAYS_IT & schema.keys():
        return False
    return all(isinstance(name, str) and name in named for name in required)
