"""The fields that chat and text completions share, and those that this version refuses by name."""

from collections.abc import Container, Mapping
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from contract.requests import MAX_CHOICES
from contract.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS
from router.http.body import Body
from router.http.grammars import grammar_fields
from router.http.strictness import check_ignored

FOREIGN = (
    "system",
    "chat_template",
    "instructions",
    "text",
    "json_schema",
    "grammar",
    "regex",
    "ebnf",
    "structural_tag",
    "format",
    "guided_json_object",
    "guided_decoding",
    "max_output_tokens",
    "max_new_tokens",
    "min_new_tokens",
    "n_predict",
    "num_predict",
    "stop_sequences",
    "repeat_penalty",
    "no_repeat_ngram_size",
    "logits_processors",
    "allowed_tools",
)
"""Fields of other APIs and servers that tell the model something, or bind its answer: to ignore them would drop that."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "guided_whitespace_pattern": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "prompt_embeds": (),
    "lora_request": (),
    "lora_path": (),
    "prompt_adapter_request": (),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": (True, False),
    **dict.fromkeys(FOREIGN, ()),
}
"""Field → the values (besides null) that ask for nothing. One that gets served moves to ``router.http.schema``."""
_MAX_DIGITS = 10


def refuse_unserved(
    body: Body, served: Container[str] = (), known: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raise UnsupportedFieldError that names the first field which asks for something that is not served yet.

    served: fields that this endpoint serves, and others do not. known: the values that ask for nothing.
    Raises InvalidRequestError for a field that is ignored, and of a wrong type.
    """
    check_ignored(body)
    for name, value in body.fields.items():
        neutral = None if name in served else known.get(name)
        if neutral is not None:
            refuse_unless_idle(name, value, neutral)


def refuse_unless_idle(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise UnsupportedFieldError that names the field, unless the value is null or one of ``neutral``."""
    if value is not None and not any(type(value) is type(idle) and value == idle for idle in neutral):
        raise UnsupportedFieldError(
            f"{name} is not served by this version; leave it out or send {_spelled(neutral)}", param=name
        )


def _spelled(neutral: tuple[Any, ...]) -> str:
    return "null" if not neutral else " or ".join(repr(idle) for idle in neutral[:2])


def shared_fields(body: Body) -> dict[str, Any]:
    """Keyword arguments of ``GenerationRequest`` that chats and text completions read alike."""
    num_chosen, num_choices = choice_counts(body)
    return {
        "num_choices": num_choices,
        "rates_tokens": num_choices > num_chosen,
        "prompt_logprobs": _prompt_logprobs(body),
        **sampling_fields(body),
        **grammar_fields(body),
    }


def sampling_fields(body: Body) -> dict[str, Any]:
    """Those of them that every endpoint has by the same names."""
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


def _prompt_logprobs(body: Body) -> int | None:
    """How many alternatives the client sees of each token of the prompt."""
    wanted = body.integer_within("prompt_logprobs", 0, MAX_LOGPROBS)
    if wanted is not None and body.flag("stream"):
        raise InvalidRequestError("prompt_logprobs come with whole answers only", param="prompt_logprobs")
    return wanted


def choice_counts(body: Body) -> tuple[int, int]:
    """``n`` and ``best_of``: how many answers to each prompt the client gets, and of how many they are chosen."""
    num_chosen = body.integer_within("n", 1, MAX_CHOICES) or 1
    num_choices = body.integer_within("best_of", num_chosen, MAX_CHOICES) or num_chosen
    if num_choices > num_chosen and body.flag("stream"):
        raise InvalidRequestError(
            "best_of above n chooses from whole answers; it cannot stream", param="best_of"
        )
    return num_chosen, num_choices


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    """Token ids, which JSON can only write as strings, and what is added to their logits; by token id."""
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
    """Clients of vLLM write -1 for "the whole vocabulary", which is 0 here."""
    top_k = body.integer("top_k")
    return 0 if top_k == -1 else top_k
