"""``GenerateRequest`` messages, parsed into the pipeline's requests."""

from typing import Any

import msgspec

from contract.errors import InvalidRequestError
from contract.grammars import reduced
from contract.sampling import Grammar
from protos import inference_pb2 as pb
from router.grpc.prompts import prompt_of
from router.intake.request import GenerationRequest


def generation_request(
    request: pb.GenerateRequest, request_id: str, tenant: str, time_remaining: float | None
) -> GenerationRequest:
    """Parse a message. time_remaining: seconds to the client's deadline. Raises InvalidRequestError."""
    sampling: Any = request.sampling

    def given(name: str) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else None

    return GenerationRequest(
        request_id=request_id,
        prompt=prompt_of(request, "prompt"),
        model=request.model or None,
        temperature=_decimal(given("temperature")),
        top_k=given("top_k"),
        top_p=_decimal(given("top_p")),
        seed=given("seed"),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens") or 0,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=given("skip_special_tokens") is not False,
        ignore_eos=sampling.ignore_eos,
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        num_choices=given("best_of") or num_chosen(request),
        rates_tokens=is_best_of(request),
        min_p=_decimal(given("min_p")),
        presence_penalty=_decimal(sampling.presence_penalty),
        frequency_penalty=_decimal(sampling.frequency_penalty),
        repetition_penalty=_decimal(given("repetition_penalty")),
        logit_bias=tuple((token, _decimal(bias)) for token, bias in sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
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


def _decimal(value: Any) -> Any:
    """Return the decimal number that the client wrote, as over HTTP, from the 32-bit float of the message."""
    return None if value is None else float(f"{value:.7g}")
