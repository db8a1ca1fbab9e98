"""How answers are drawn, by the names of vLLM; read by the code that reads the fields of HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from contract.requests import MAX_LOGPROBS
from router.http.bodies.body import Body
from router.http.fields.sampling import shared_fields
from router.http.fields.unsupported import reject_unsupported
from router.request import GenerationRequest
from text.chat import Chat


@dataclass(kw_only=True)
class SamplingParams:
    """How the answer to one prompt is drawn. None: the model's own generation default, as over HTTP.

    n: answers to each prompt. max_tokens: at most this many new tokens; None is all that fits the model. seed: equal seeds
    give equal answers; drawn where it is None. logprobs: how many alternatives are given for each token, 0..20; 0 gives
    those of the answer's tokens alone. prompt_logprobs: the same of the prompt. top_k: 0 or -1 keeps the whole vocabulary.
    structured_outputs: one of json (a schema), json_object, regex, choice (a list) and grammar, that the answer matches.
    include_stop_str_in_output: the text keeps what stopped it. skip_special_tokens: these and end tokens have no text.
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
        """The request that HTTP would make of these fields and ``others`` (priority, cache_salt).

        Raises InvalidRequestError, UnsupportedFieldError among them.
        """
        body = Body({field.name: _as_json(getattr(self, field.name)) for field in fields(self)} | others)
        reject_unsupported(body)
        return GenerationRequest(
            request_id=request_id,
            prompt=prompt,
            max_tokens=body.integer("max_tokens"),
            logprobs=body.integer_within("logprobs", 0, MAX_LOGPROBS),
            **shared_fields(body),
        )


def _as_json(value: Any) -> Any:
    """A value as a body of JSON has it."""
    if isinstance(value, Mapping):
        return {str(name): inner for name, inner in value.items()}
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    return value
