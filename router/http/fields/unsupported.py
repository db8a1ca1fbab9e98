"""The fields that are rejected by name, and those that are accepted and ignored.

A field that another server supports and this one does not is rejected unless the value is a no-op, so that no option
is silently ignored. When a field becomes supported, its entry here is deleted.
"""

from collections.abc import Container, Mapping
from typing import Any

from contract.errors import InvalidRequestError, UnsupportedFieldError
from router.http.bodies.body import Body, Reader
from router.http.fields.foreign import PEER_FIELDS

FOREIGN = (
    *("system", "chat_template", "instructions", "text", "json_schema", "grammar", "regex", "ebnf"),
    *("structural_tag", "format", "guided_json_object", "guided_decoding", "max_output_tokens"),
    *("max_new_tokens", "min_new_tokens", "n_predict", "num_predict", "stop_sequences", "repeat_penalty"),
    *("no_repeat_ngram_size", "logits_processors", "allowed_tools"),
)
"""Fields of other APIs and servers that instruct the model or constrain its answer: ignoring them would drop that."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **PEER_FIELDS,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "guided_whitespace_pattern": (),
    "truncate_prompt_tokens": (),  # named here since embeddings describe it as well
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "lora_request": (),
    "prompt_adapter_request": (),
    "mm_processor_kwargs": ({},),
    "spaces_between_special_tokens": (True, False),
    "truncation_side": ("left", "right"),  # of truncate_prompt_tokens
    "thinking_token_budget": (-1,),
    "stream_interval": (1,),
    "return_tokens_as_token_ids": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True, False),
    "watermarking": (False,),
    **dict.fromkeys(FOREIGN, ()),
}
"""Field → the values (besides null) that are no-ops; hand-written entries go over the generated ones."""
OPENAI_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "max_completion_tokens": (),
    "response_format": (),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "echo": (False,),
    "n": (1,),
    "best_of": (1,),
    "return_token_ids": (False,),
}
"""``NEUTRAL`` for fields of chats and text completions, on the endpoints that have other names for them, or none."""
STREAM_NEUTRAL: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
"""``NEUTRAL`` of ``stream_options``."""


def _texts(body: Body, name: str) -> None:
    for key, value in body.object(name).fields.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name}[{key[:20]!r}] must be a string", param=name)


_IGNORED: dict[str, Reader] = {
    "user": Body.string,
    "safety_identifier": Body.string,
    "prompt_cache_key": Body.string,
    "metadata": _texts,
    "service_tier": Body.string,
    "store": Body.flag,
    "prompt_cache_retention": Body.string,
    "client_metadata": Body.object,
    "request_id": Body.string,
    "session_id": Body.string,
    "rid": Body.string,
    "prompt_cache_options": Body.object,
    "prediction": Body.object,
}


def reject_unsupported(
    body: Body, supported: Container[str] = (), known: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raise UnsupportedFieldError that names the first field which asks for something that is not supported.

    supported: fields that this endpoint supports although others do not. known: field → neutral values.
    Raises InvalidRequestError for an ignored field of a wrong type.
    """
    body.given(_IGNORED)
    for name, value in body.fields.items():
        neutral = None if name in supported else known.get(name)
        if neutral is not None:
            reject_unless_neutral(name, value, neutral)


def reject_unless_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raise UnsupportedFieldError that names the field, unless the value is null or one of ``neutral``."""
    # by type as well: 1 equals true in Python
    if value is not None and not any(type(value) is type(idle) and value == idle for idle in neutral):
        spelled = " or ".join(repr(idle) for idle in neutral[:2]) or "null"
        raise UnsupportedFieldError(
            f"{name} is not served by this version; leave it out or send {spelled}", param=name
        )
