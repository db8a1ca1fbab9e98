"""Reasoning effort and verbosity: OpenAI's fields and the chat templates' variables."""

from typing import Any

from contract.errors import InvalidRequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")


def thinking_kwargs(effort: Any, effort_field: str, verbosity: Any, verbosity_field: str) -> dict[str, Any]:
    """Return the template's variables for an effort and a verbosity; none for null.

    Templates read ``reasoning_effort`` (gpt-oss), ``enable_thinking`` (Qwen 3) or ``thinking`` (DeepSeek V3.1), or ignore
    them all. Raises InvalidRequestError that names the field.
    """
    found: dict[str, Any] = {}
    check_choice(effort_field, effort, EFFORTS)
    check_choice(verbosity_field, verbosity, VERBOSITIES)
    if effort is not None:
        thinks = effort != "none"
        found |= {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    if verbosity is not None:
        found["verbosity"] = verbosity
    return found


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """Raise InvalidRequestError that names the field, unless the value is null or one of ``known``."""
    if value is not None and value not in known:
        raise InvalidRequestError(
            f"{name} is {str(value)[:40]!r}; choose one of {', '.join(known)}", param=name
        )
