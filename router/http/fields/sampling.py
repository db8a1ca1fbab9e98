"""The sampling fields: those that all endpoints share, and those that chats and text completions share."""

from typing import Any

from contract.errors import InvalidRequestError
from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from router.http.bodies.body import Body
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
    """Read the arguments of ``GenerationRequest`` that every endpoint has under the same names."""
    return {
        "model": body.string("model"),
        "temperature": body.number("temperature"),
        "top_k": _top_k(body),
        "top_p": body.number("top_p"),
        "seed": body.integer("seed"),
        "min_tokens": body.integer("min_tokens") or 0,
        "stop": body.strings("stop"),
        "stop_token_ids": body.integers("stop_token_ids"),
        "include_stop_str_in_output": body.flag("include_stop_str_in_output"),
        "skip_special_tokens": body.flag("skip_special_tokens", default=True),
        "ignore_eos": body.flag("ignore_eos"),
        "min_p": body.number("min_p"),
        "presence_penalty": body.number("presence_penalty") or 0.0,
        "frequency_penalty": body.number("frequency_penalty") or 0.0,
        "repetition_penalty": body.number("repetition_penalty"),
        "logit_bias": _logit_bias(body),
        "allowed_token_ids": body.integers("allowed_token_ids"),
        "priority": body.integer("priority") or 0,
        "cache_salt": body.string("cache_salt") or "",
    }


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


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    """Read ``logit_bias``, whose keys are token ids as strings, since JSON has no other keys; sorted by token id."""
    found: dict[int, float] = {}
    for name, bias in body.object("logit_bias").fields.items():
        is_id = name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS
        if not is_id or type(bias) not in (int, float) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias holds {name[:20]!r}: {str(bias)[:20]}; it must map token ids to numbers in"
                f" -{MAX_LOGIT_BIAS:g}..{MAX_LOGIT_BIAS:g}",
                param="logit_bias",
            )
        found[int(name)] = float(bias)
    return tuple(sorted(found.items()))


def _top_k(body: Body) -> int | None:
    top_k = body.integer("top_k")
    return 0 if top_k == -1 else top_k  # vLLM's clients write -1 for the whole vocabulary
