"""Compiles and renders chat templates in jinja2's sandbox, with the functions that ``transformers`` provides.

A template has access to the variables of the request, the functions ``raise_exception`` and ``strftime_now``, the filter
``tojson``, loop controls and ``{% generation %}`` blocks.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.errors import InvalidRequestError, SettingError

DEFAULT = "default"
"""Name of the template that every model with chats has."""
_REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Errors of a template for a conversation that it does not support."""


class TemplateLimitError(InvalidRequestError):
    """A rendering took too much time or memory, or its output is too long."""


class TemplateRefusalError(InvalidRequestError):
    """A template rejects the messages with its own error message."""


class Renderer(Protocol):
    """Renders a model's named templates."""

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises InvalidRequestError with the template's own message if it rejects the variables."""

    def close(self) -> None:
        """Release the renderer's resources; it must not be used afterwards."""


class LocalRenderer:
    """Renders in this process, without limits of time and memory. Raises SettingError if a template cannot be compiled."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._templates = {name: _compiled(environment, source) for name, source in sources.items()}

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises InvalidRequestError with the template's own message if it rejects the variables."""
        try:
            return self._templates[name].render(variables)
        except _REFUSALS as error:
            raise refusal(str(error)) from error

    def close(self) -> None:
        """Do nothing: there are no resources to release."""


def refusal(words: str) -> TemplateRefusalError:
    """Return the error for messages that the template rejects with this message."""
    return TemplateRefusalError(
        f"the model's chat template rejects these messages: {words[:500]}", param="messages"
    )


def _compiled(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise SettingError(f"the chat template cannot be compiled: {error}", param="model") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}``, which marks answers for training; here only its content is used."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Replace the block by its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
