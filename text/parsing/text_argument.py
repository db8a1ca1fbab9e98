"""The text of a custom tool's call, which the model writes as the only argument of a function."""

import json
import re
from typing import Any

NAME = "input"
"""Name of the argument."""
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {NAME: {"type": "string"}},
    "required": [NAME],
    "additionalProperties": False,
}
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(
    r"""(?:[^"\\]
    |\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[0-9a-fA-F]{4}|(?=[^\\])|(?=\\[^u]))  # the halves of a pair stay together
    |\\u(?![dD][89abAB])[0-9a-fA-F]{4}
    |\\[^u])*""",
    re.VERBOSE,
)
"""Characters and whole escapes; the rest is the end of the text, or an escape that more text completes."""


def as_argument(text: str) -> str:
    """Return the JSON arguments of a call with this text."""
    return json.dumps({NAME: text}, ensure_ascii=False)


def argument_text(arguments: str) -> str:
    """Return the text of a whole call; arguments of another form are the text themselves."""
    argument = TextArgument()
    return argument.push(arguments) + argument.flush()


class TextArgument:
    """Decodes the argument while it is written. Owns the JSON text that was not returned yet."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_inside = False
        self._is_over = False

    def push(self, piece: str) -> str:
        """Return the decoded text of another piece of the arguments, as far as it is certain."""
        if self._is_over:
            return ""
        self._rest += piece
        if not self._is_inside:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._is_inside = True
            self._rest = self._rest[head.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None, "the pattern matches the empty text"
        self._is_over = self._rest[whole.end() : whole.end() + 1] == '"'
        return self._take(whole.end())

    def flush(self) -> str:
        """Return the rest: arguments of another form unchanged, and the end of a text that was cut off."""
        rest = "" if self._is_over else self._rest
        self._is_over = True
        return rest

    def _take(self, end: int) -> str:
        written = self._rest[:end]
        self._rest = self._rest[end:]
        try:
            return str(json.loads(f'"{written}"', strict=False)).encode("utf-8", "replace").decode()
        except ValueError:
            return written
