"""The prompts of a body, in all forms that OpenAI's completions and embeddings accept."""

from typing import Any

from contract.errors import InvalidRequestError


def prompts_of(raw: Any, max_prompts: int, *, param: str) -> list[str | tuple[int, ...]]:
    """Read one prompt (a text or token ids), or a list of them. Raises InvalidRequestError about ``param``."""
    several = raw if isinstance(raw, list) and raw and isinstance(raw[0], str | list) else [raw]
    if len(several) > max_prompts:
        raise InvalidRequestError(
            f"{param} has {len(several)} prompts; the limit is {max_prompts}", param=param
        )
    return [_prompt(one, param) for one in several]


def _prompt(raw: Any, param: str) -> str | tuple[int, ...]:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list) and all(type(token) is int for token in raw):
        return tuple(raw)
    raise InvalidRequestError(
        f"{param} must be a string, a list of token ids, or a list of these", param=param
    )
