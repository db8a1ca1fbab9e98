"""The fields that several endpoints share: sampling parameters, the number of choices, and prompts of text or token ids."""

from typing import Any

from contract.errors import InvalidRequestError
from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, PARAMETERS, Parameter
from router.http.bodies.body import Body, Reader
from router.http.fields.grammars import grammar_fields

_MAX_DIGITS = 10


def read_shared_fields(body: Body) -> dict[str, Any]:
    """Read the arguments of ``GenerationRequest`` that chats and text completions have in common."""
    num_chosen = body.integer_within("n", 1, MAX_CHOICES) or 1
    # ``best_of`` are computed, and ``n`` of them are returned
    num_choices = body.integer_within("best_of", num_chosen, MAX_CHOICES) or num_chosen
    if num_choices > num_chosen and body.flag("stream"):
        raise InvalidRequestError(
            "best_of above n chooses from whole answers; it cannot stream", param="best_of"
        )
    prompt_logprobs = body.integer_within("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and body.flag("stream"):
        raise InvalidRequestError("prompt_logprobs come with whole answers only", param="prompt_logprobs")
    return {
        "num_choices": num_choices,
        "rates_tokens": num_choices > num_chosen,
        "prompt_logprobs": prompt_logprobs,
        **sampling_fields(body),
        **grammar_fields(body),
    }


def sampling_fields(body: Body) -> dict[str, Any]:
    """Read the arguments of ``GenerationRequest`` that every endpoint has under the same names.

    Fields that are missing or null keep the defaults of ``GenerationRequest``.
    """
    return body.given(_SAMPLING)


def is_streamed(body: Body) -> bool:
    """Read ``stream``. Raises InvalidRequestError for ``stream_options`` without it."""
    stream = body.flag("stream")
    if body.get("stream_options") is not None and not stream:
        raise InvalidRequestError("stream_options is allowed with stream only", param="stream_options")
    return stream


def _biases(body: Body, name: str) -> tuple[tuple[int, float], ...]:
    """Read an object whose keys are token ids as strings, since JSON has no other keys; sorted by token id."""
    found: dict[int, float] = {}
    for token, bias in body.object(name).fields.items():
        # the length too: to convert thousands of digits takes long
        is_id = token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS
        if not is_id or type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"{name} holds {token[:20]!r}: {str(bias)[:20]}; it must map token ids to numbers in"
                f" -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}",
                param=name,
            )
        found[int(token)] = float(bias)
    return tuple(sorted(found.items()))


_READERS: dict[str, Reader] = {
    "number": Body.number,
    "integer": Body.integer,
    "flag": Body.flag,
    "token_ids": Body.integers,
    "biases": _biases,
}


def _reader(parameter: Parameter) -> Reader:
    """Return the reader of a sampling parameter."""
    read = _READERS[parameter.kind]
    if parameter.written_for_default is None:
        return read

    def read_with_default(body: Body, name: str) -> Any:
        value = read(body, name)
        # vLLM's clients write -1 where others leave the field out
        return parameter.default if value == parameter.written_for_default else value

    return read_with_default


_SAMPLING: dict[str, Reader] = {
    **{parameter.name: _reader(parameter) for parameter in PARAMETERS if parameter.meaning},
    "model": Body.string,
    "stop": Body.strings,
    "include_stop_str_in_output": Body.flag,
    "skip_special_tokens": Body.flag,
    "priority": Body.integer,
    "cache_salt": Body.string,
}
"""Field → how it is read."""


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
