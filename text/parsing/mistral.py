"""Mistral: ``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, and since 2025 ``[TOOL_CALLS]name[ARGS]{…}`` for each."""

import re
import secrets
import string

from text.parsing.json_text import copy_value
from text.parsing.parser import ToolParser
from text.parsing.reader import Steps

_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_ID_LENGTH = 9
_ID_CHARACTERS = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """Parses calls that follow a tag, anywhere in the answer."""

    tags = (_CALLS, _CALL_ID, _ARGS)

    def _read(self) -> Steps[None]:
        yield from self._read_marked([_CALLS], self._read_calls)

    @staticmethod
    def new_call_id() -> str:
        """Return 9 letters and digits: these models' templates reject other ids."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

    def _read_calls(self, _: str) -> Steps[None]:
        yield from self._reader.skip_space()
        if (yield from self._reader.skip("[")):
            yield from self._read_list()
        elif (yield from self._reader.peek()) == "{":
            yield from self._read_object()
        else:
            yield from self._read_named()

    def _read_named(self) -> Steps[None]:
        reader = self._reader
        name = yield from reader.take_all(_NAME)
        if name and (yield from reader.skip(_CALL_ID)):
            yield from reader.take_all(_NAME)
        yield from reader.skip(_ARGS)
        yield from reader.skip_space()
        if name and (yield from reader.peek()) == "{":
            self._begin(name)
            yield from copy_value(reader, self._arguments)
