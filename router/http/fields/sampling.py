"""The sampling fields: those that all endpoints share, and those that chats and text completions share."""

from typing import Any

from contract.errors import InvalidRequestError
from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from router.http.bodies.body import Body, Reader
from router.http.fields.grammars import grammar_fields

_MAX_DIGITS = 10


def shared_fields(body: Body) -> dict[str, Any]:
    """Read the arguments of ``GenerationRequest`` that chats and text completions have in common."""
    num_chosen, num_choices = choice_counts(body)
    return {
        "num_choices": num_choices,
        "rates_tokens": num_choices > num_chosen,
        "prompt_logprobs": _prompt_logprobs(body),
        **sampling_fields(body),
        **grammar_fields(body),
    }


def sampling_fields(body: Body) -> dict[str, Any]:
    """Read the arguments of ``GenerationRequest`` that every endpoint has under the same names.

    Fields that are missing or null keep the defaults of ``GenerationRequest``.
    """
    return body.given(_SAMPLING)


def choice_counts(body: Body) -> tuple[int, int]:
    """Read ``n`` and ``best_of``: how many answers to each prompt are returned, and how many are computed."""
    num_chosen = body.integer_within("n", 1, MAX_CHOICES) or 1
    num_choices = body.integer_within("best_of", num_chosen, MAX_CHOICES) or num_chosen
    if num_choices > num_chosen and body.flag("stream"):
        raise InvalidRequestError(
            "best_of above n chooses from whole answers; it cannot stream", param="best_of"
        )
    return num_chosen, num_choices


def _prompt_logprobs(body: Body) -> int | None:
    wanted = body.integer_within("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and body.flag("stream"):
        raise InvalidRequestError("prompt_logprobs come with whole answers only", param="prompt_logprobs")
    return wanted


def _logit_bias(body: Body, name: str) -> tuple[tuple[int, float], ...]:
    """Read ``logit_bias``, whose keys are token ids as strings, since JSON has no other keys; sorted by token id."""
    found: dict[int, float] = {}
    for token, bias in body.object(name).fields.items():
        is_id = token.isascii() and token.isdigit() and len(token) <= _MAX_DIGITS
        if not is_id or type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias holds {token[:20]!r}: {str(bias)[:20]}; it must map token ids to numbers in"
                f" -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}",
                param="logit_bias",
            )
        found[int(token)] = float(bias)
    return tuple(sorted(found.items()))


def _top_k(body: Body, name: str) -> int | None:
    top_k = body.integer(name)
    return 0 if top_k == -1 else top_k  # vLLM's clients write -1 for the whole vocabulary


_SAMPLING: dict[str, Reader] = {
    "model": Body.string,
    "temperature": Body.number,
    "top_k": _top_k,
    "top_p": Body.number,
    "seed": Body.integer,
    "min_tokens": Body.integer,
    "stop": Body.strings,
    "stop_token_ids": Body.integers,
    "include_stop_str_in_output": Body.flag,
    "skip_special_tokens": Body.flag,
    "ignore_eos": Body.flag,
    "min_p": Body.number,
    "presence_penalty": Body.number,
    "frequency_penalty": Body.number,
    "repetition_penalty": Body.number,
    "logit_bias": _logit_bias,
    "allowed_token_ids": Body.integers,
    "priority": Body.integer,
    "cache_salt": Body.string,
}
"""Field → how it is read."""
