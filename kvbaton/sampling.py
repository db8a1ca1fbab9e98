"""Sampling parameters with vLLM's names, checked by the code that checks the fields of HTTP requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from contract.sampling import MAX_LOGPROBS
from router.http.bodies.body import Body
from router.http.fields.sampling import read_shared_fields
from router.http.fields.unsupported import reject_unsupported
from router.intake.request import GenerationRequest
from text.chat import Chat


@dataclass(kw_only=True)
class SamplingParams:
    """The sampling parameters of one prompt. None: the model's generation default, as over HTTP.

    n: number of answers per prompt. max_tokens: maximum number of new tokens; None: up to the model's limit. seed: equal
    seeds give equal answers; None: chosen at random. logprobs: number of alternatives for each token, 0..20; 0 returns only
    the sampled tokens' own. prompt_logprobs: the same for the prompt. top_k: 0 or -1 keeps the whole vocabulary.
    structured_outputs: one of json (a schema), json_object, regex, choice (a list) and grammar, which the answer matches.
    include_stop_str_in_output: the text includes the stop string. skip_special_tokens: special and end tokens have no text.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def request(
        self, request_id: str, prompt: str | tuple[int, ...] | Chat, **others: Any
    ) -> GenerationRequest:
        """Make the request that HTTP would make of these fields and ``others`` (priority, cache_salt).

        Raises InvalidRequestError, or its subclass UnsupportedFieldError.
        """
        body = Body({field.name: _as_json(getattr(self, field.name)) for field in fields(self)} | others)
        reject_unsupported(body)
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=body.integer("max_tokens"),
            logprobs=body.integer_within("logprobs", 0, MAX_LOGPROBS),
            **read_shared_fields(body),
        )


def _as_json(value: Any) -> Any:
    """Return a value in the form that a JSON body has."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return value
