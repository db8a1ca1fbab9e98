"""The messages of ``kvbaton.v1.Inference``: checked, parsed into the pipeline's requests, and made of its deltas.

The lists of a message are checked before they become Python objects, which take many times their bytes.
"""

from collections.abc import Mapping, Sized
from typing import Any

import msgspec
from google.protobuf.descriptor import FieldDescriptor

from contract.errors import InvalidRequestError
from contract.json_schema import reduced
from contract.outputs import FinishReason
from contract.sampling import LISTS, MAX_GRAMMAR_BYTES, Grammar
from protos import inference_pb2 as pb
from router.answers.answer import Delta
from router.intake.limits import MAX_PROMPT_TOKENS, MAX_PROMPTS, MAX_STOPS
from router.intake.request import EmbeddingRequest, GenerationRequest, for_prompts
from router.tokens.delivery import Token
from wire.legs import pooling_from_proto

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_MAX_CHOICES = MAX_GRAMMAR_BYTES // 3
"""Most texts of a grammar: each takes at least two quotes and a comma."""


def generation_request(
    request: pb.GenerateRequest, request_id: str, tenant: str, time_remaining: float | None
) -> GenerationRequest:
    """Parse a message. time_remaining: seconds to the client's deadline. Raises InvalidRequestError."""
    # a field that is unset keeps the default of GenerationRequest, which has the message's names
    given = {field.name: _value(field, value) for field, value in request.sampling.ListFields()}
    given.pop("n", None)
    num_choices = given.pop("best_of", None) or num_chosen(request)
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt_of(request, "prompt"),
        model=request.model or None,
        num_choices=num_choices,
        rates_tokens=is_best_of(request),
        **given,
        grammar=_grammar(request.grammar) if request.HasField("grammar") else None,
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=tenant,
        timeout_seconds=time_remaining,
    )


def num_chosen(request: pb.GenerateRequest) -> int:
    """Return ``n``, the number of answers that the client gets."""
    return request.sampling.n if request.sampling.HasField("n") else 1


def is_best_of(request: pb.GenerateRequest) -> bool:
    """Return True if more answers are computed than returned. Raises InvalidRequestError if fewer are."""
    if not request.sampling.HasField("best_of"):
        return False
    if request.sampling.best_of < num_chosen(request):
        raise InvalidRequestError(
            f"best_of is {request.sampling.best_of}; it must not be less than n", param="best_of"
        )
    return request.sampling.best_of > num_chosen(request)


def _grammar(grammar: pb.AnswerGrammar) -> Grammar | None:
    match grammar.WhichOneof("kind"):
        case None:
            raise InvalidRequestError("the grammar has no kind that this version supports", param="grammar")
        case "json_object":
            return Grammar("json_object") if grammar.json_object else None
        case "choice":
            return Grammar("choice", msgspec.json.encode(list(grammar.choice.texts)).decode())
        case kind:
            return reduced(Grammar(kind, getattr(grammar, kind)))


def _value(field: FieldDescriptor, value: Any) -> Any:
    """Return the value of a field of sampling parameters as HTTP's reader would."""
    if not field.is_repeated:
        return _decimal(value) if isinstance(value, float) else value
    if isinstance(value, Mapping):
        return tuple((token, _decimal(bias)) for token, bias in sorted(value.items()))
    return tuple(value)


def _decimal(value: float) -> float:
    """Return the decimal number that the client wrote, as over HTTP, from the 32-bit float of the message."""
    # 0.7 arrives as 0.699999988: without this the two APIs would draw other tokens from the same seed
    return float(f"{value:.7g}")


def prompt_of(message: pb.GenerateRequest | pb.EmbedInput, param: str) -> str | tuple[int, ...]:
    """Return the prompt. Raises InvalidRequestError about ``param`` if there is none."""
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "token_ids":
            return tuple(message.token_ids.ids)
        case _:
            raise InvalidRequestError(f"{param} has neither text nor token_ids", param=param)


def generate_response(name: str, delta: Delta) -> pb.GenerateResponse:
    """Return the message for one delta. name: of the request."""
    choice = pb.ChoiceDelta(
        index=delta.index,
        token_ids=[token.token_id for token in delta.tokens],
        text=delta.text,
        logprobs=[_logprob(token) for token in delta.tokens if token.logprobs],
        prompt_logprobs=[
            _logprob(token) for token in (delta.prompt.tokens if delta.prompt else ()) if token.logprobs
        ],
        finish_reason=_FINISH[delta.finish_reason] if delta.finish_reason else pb.FINISH_REASON_UNSPECIFIED,
        stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
    )
    response = pb.GenerateResponse(request_id=name, choices=[choice])
    if delta.usage:
        response.usage.prompt_tokens = delta.usage.num_prompt_tokens
        response.usage.completion_tokens = delta.usage.num_completion_tokens
        response.usage.cached_tokens = delta.usage.num_cached_tokens
    if delta.timings:
        response.timings.CopyFrom(pb.Timings(**delta.timings.as_dict()))
    return response


def joined(parts: list[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Return the messages of a stream as one: a choice's tokens, text and log probabilities are concatenated."""
    whole = pb.GenerateResponse()
    choices: dict[int, pb.ChoiceDelta] = {}
    for part in parts:
        for delta in part.choices:
            choice = choices.setdefault(delta.index, pb.ChoiceDelta())
            # protobuf's merge appends lists, but replaces a string
            text = choice.text + delta.text
            choice.MergeFrom(delta)
            choice.text = text
        for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(whole.usage, count, getattr(whole.usage, count) + getattr(part.usage, count))
        # they were added above; the merge is for what only one part has
        part.ClearField("choices")
        part.ClearField("usage")
        whole.MergeFrom(part)
    whole.choices.extend(choices[index] for index in sorted(choices))
    return whole


def _logprob(token: Token) -> pb.TokenLogprob:
    if token.logprobs is None:
        return pb.TokenLogprob(token_id=token.token_id)
    top = zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True)
    return pb.TokenLogprob(
        token_id=token.token_id,
        logprob=token.logprobs.logprob,
        rank=token.logprobs.rank,
        top=[
            pb.TokenLogprob(token_id=token_id, logprob=logprob, rank=rank)
            for rank, (token_id, logprob) in enumerate(top, 1)
        ],
    )


def embedding_requests(
    request: pb.EmbedRequest, request_id: str, tenant: str, time_remaining: float | None
) -> list[EmbeddingRequest]:
    """Return one request for each input. time_remaining: seconds to the client's deadline. Raises InvalidRequestError."""
    first, *others = (prompt_of(each, f"inputs[{number}]") for number, each in enumerate(request.inputs))
    one = EmbeddingRequest(
        request_id=request_id,
        prompt=first,
        model=request.model or None,
        dimensions=request.dimensions or None,
        pooling=pooling_from_proto(request),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=tenant,
        timeout_seconds=time_remaining,
    )
    return for_prompts(one, others)


def check_generate(request: pb.GenerateRequest, max_model_len: int) -> None:
    """Raise InvalidRequestError that names the first list that is too long."""
    sampling = request.sampling
    lists: list[tuple[str, Sized, int]] = [
        ("stop", sampling.stop, MAX_STOPS),
        *((it.name, getattr(sampling, it.name), it.max_items or 0) for it in LISTS),
    ]
    if request.grammar.WhichOneof("kind") == "choice":
        lists.append(("grammar.choice", request.grammar.choice.texts, _MAX_CHOICES))
    if request.WhichOneof("prompt") == "token_ids":
        lists.append(("prompt", request.token_ids.ids, max(MAX_PROMPT_TOKENS, max_model_len)))
    for name, held, most in lists:
        if len(held) > most:
            raise InvalidRequestError(f"{name} has {len(held)} entries; the limit is {most}", param=name)


def check_embed(request: pb.EmbedRequest, max_model_len: int) -> None:
    """Raise InvalidRequestError for no inputs, too many inputs, or too many token ids in all of them."""
    if not 1 <= len(request.inputs) <= MAX_PROMPTS:
        raise InvalidRequestError(
            f"inputs has {len(request.inputs)} entries; it must have 1 to {MAX_PROMPTS}", param="inputs"
        )
    # a single prompt may have what fits the model in any case
    most = max(MAX_PROMPT_TOKENS, max_model_len)
    total = sum(len(one.token_ids.ids) for one in request.inputs)
    if total > most:
        raise InvalidRequestError(f"inputs have {total} token ids; the limit is {most}", param="inputs")


def check_detokenize(request: pb.DetokenizeRequest) -> None:
    """Raise InvalidRequestError for too many token ids."""
    if len(request.token_ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"token_ids has {len(request.token_ids)} entries; the limit is {MAX_PROMPT_TOKENS}",
            param="token_ids",
        )
