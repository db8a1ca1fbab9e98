"""kvbaton.v1.Inference: the same pipeline as HTTP, for internal services."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from contract.errors import CancelledError, InternalError, InvalidRequestError, KvbatonError
from contract.grammars import reduced
from contract.requests import FinishReason, Grammar, check_token_ids
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.answer import Delta
from router.best_of import choose_best
from router.cancellation import CancellableRequests, client_name
from router.delivery import Token
from router.grpc_embedding import embed_response, embeddings_asked
from router.grpc_limits import check_detokenize, check_embed, check_generate
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.registry import Registry
from router.request import GenerationRequest, new_request_id
from router.tokenizing import TokenizerThreads, encode_text
from serving.api_keys import ApiKeys
from serving.grpc_errors import abort
from serving.grpc_keys import authorization_of

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-kvbaton-request-id"
"""Initial metadata: the router's id of a request."""
_NAME_KEY = "x-request-id"
_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Answers by the same pipeline as HTTP. A client that cancels, or whose deadline passes, cancels its request."""

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        registry: Registry,
        running: CancellableRequests,
        keys: ApiKeys,
        tokenizers: TokenizerThreads,
        stall_seconds: float,
    ) -> None:
        self._pipeline = pipeline
        self._models = models
        self._registry = registry
        self._tokenizers = tokenizers
        self._running = running
        self._keys = keys
        self._stall_seconds = stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """One prompt; the last message has usage and timings. Errors have the codes of ``serving.errors``."""
        async with (
            _answering(context, "gen") as request_id,
            self._deltas(request, request_id, context) as (name, deltas),
        ):
            if _is_best_of(request):
                raise InvalidRequestError(
                    "best_of above n chooses from whole answers; ask GenerateOnce", param="best_of"
                )
            async for delta in deltas:
                if delta.tokens or delta.finish_reason:
                    await self._write(context, _response(name, delta))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        """The same in one message."""
        async with (
            _answering(context, "gen") as request_id,
            self._deltas(request, request_id, context) as (name, deltas),
        ):
            found = [delta async for delta in deltas]
            if _is_best_of(request):
                found = choose_best(found, _num_chosen(request), request.sampling.best_of)
            return _joined([_response(name, delta) for delta in found])

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        """The embeddings of all inputs, or of none."""
        async with _answering(context, "emb") as request_id:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            metadata = context.invocation_metadata()
            name = _name(request, metadata)
            tenant = self._keys.tenant(authorization_of(metadata))
            check_embed(request, self._max_model_len())
            asked = embeddings_asked(request, request_id, context.time_remaining(), tenant)
            async with self._running.open(authorization_of(metadata), request_id, name):
                return embed_response(name or request_id, await self._pipeline.embed(*asked))

    async def Cancel(  # noqa: N802
        self, request: pb.CancelGenerationRequest, context: Any
    ) -> pb.CancelGenerationResponse:
        """End the caller's requests of this id or name."""
        answer = pb.CancelGenerationResponse()
        async with _answering(context, "cancel"):
            if not request.request_id:
                raise InvalidRequestError("request_id is missing: an id or a name", param="request_id")
            owner = authorization_of(context.invocation_metadata())
            answer.num_cancelled = self._running.cancel(owner, request.request_id)
        return answer

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """The ids of a text, with the special tokens that the tokenizer adds where they are wanted."""
        answer = pb.TokenizeResponse()
        async with _answering(context, "tok"):
            card = self._models.card_named(request.model)
            length = self._registry.max_model_len(card.max_model_len)
            text = request.text
            has_special = not request.no_special_tokens
            encode = partial(encode_text, card.tokenizer, text, length, has_special)
            answer.token_ids.extend(await self._tokenizers.run(len(text), encode))
        return answer

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        """The text of ids, special tokens included."""
        answer = pb.DetokenizeResponse()
        async with _answering(context, "detok"):
            card = self._models.card_named(request.model)
            check_detokenize(request)
            check_token_ids(request.token_ids, card.vocab_size, param="token_ids")
            decode = partial(card.tokenizer.decode, request.token_ids, skip_special_tokens=False)
            answer.text = await self._tokenizers.run(len(request.token_ids), decode)
        return answer

    async def ListModels(self, _: pb.ListModelsRequest, _context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """The served model; none while it is not known yet."""
        if not self._models.is_known:
            return pb.ListModelsResponse()
        card = self._models.card()
        length = self._registry.max_model_len(card.max_model_len)
        model = pb.Model(name=card.name, max_model_len=length, embeds_only=self._registry.embeds_only)
        return pb.ListModelsResponse(models=[model])

    def _max_model_len(self) -> int:
        return self._registry.max_model_len(self._models.card().max_model_len) if self._models.is_known else 0

    @asynccontextmanager
    async def _deltas(
        self, request: pb.GenerateRequest, request_id: str, context: Any
    ) -> AsyncIterator[tuple[str, AsyncIterator[Delta]]]:
        """What the request is called in its answer, and the answer."""
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        metadata = context.invocation_metadata()
        name = _name(request, metadata)
        tenant = self._keys.tenant(authorization_of(metadata))
        check_generate(request, self._max_model_len())
        asked = replace(_asked(request, request_id, context.time_remaining()), tenant=tenant)
        async with (
            self._running.open(authorization_of(metadata), request_id, name),
            aclosing(self._pipeline.generate(asked)) as deltas,
        ):
            yield name or request_id, deltas

    async def _write(self, context: Any, response: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(response)
        except TimeoutError:
            raise CancelledError(
                f"the client has read nothing for {self._stall_seconds} s; the request is cancelled"
            ) from None


@asynccontextmanager
async def _answering(context: Any, prefix: str) -> AsyncIterator[str]:
    """Within, an error ends the call with its status. Gives the id that the log knows the call by."""
    request_id = new_request_id(prefix)
    try:
        yield request_id
    except KvbatonError as error:
        await abort(context, error, request_id)
    except Exception:
        logger.exception("%s: a bug", request_id)
        told = InternalError(f"an internal error; the log names it by {request_id}")
        await abort(context, told, request_id)


def _name(request: pb.GenerateRequest | pb.EmbedRequest, metadata: Any) -> str | None:
    """The client's name of its request. Raises InvalidRequestError for a ``request_id`` that is no name."""
    if not request.request_id:
        given = dict(metadata or ()).get(_NAME_KEY)
        return client_name(given if isinstance(given, str) else None)
    if not client_name(request.request_id):
        raise InvalidRequestError(
            "request_id must be 1 to 64 printable ASCII characters without spaces", param="request_id"
        )
    return request.request_id


def _asked(request: pb.GenerateRequest, request_id: str, time_remaining: float | None) -> GenerationRequest:
    sampling: Any = request.sampling

    def given(name: str) -> Any:
        return getattr(sampling, name) if sampling.HasField(name) else None

    return GenerationRequest(
        request_id=request_id,
        prompt=_prompt(request),
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
        num_choices=given("best_of") or _num_chosen(request),
        rates_tokens=_is_best_of(request),
        min_p=_decimal(given("min_p")),
        presence_penalty=_decimal(sampling.presence_penalty),
        frequency_penalty=_decimal(sampling.frequency_penalty),
        repetition_penalty=_decimal(given("repetition_penalty")),
        logit_bias=tuple((token, _decimal(bias)) for token, bias in sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        grammar=_grammar(request.grammar) if request.HasField("grammar") else None,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_seconds=time_remaining,
    )


def _grammar(asked: pb.AnswerGrammar) -> Grammar | None:
    match asked.WhichOneof("kind"):
        case None:
            raise InvalidRequestError("the grammar is of no kind that this version knows", param="grammar")
        case "json_object":
            return Grammar("json_object") if asked.json_object else None
        case "choice":
            return Grammar("choice", msgspec.json.encode(list(asked.choice.texts)).decode())
        case kind:
            return reduced(Grammar(kind, getattr(asked, kind)))


def _num_chosen(request: pb.GenerateRequest) -> int:
    return request.sampling.n if request.sampling.HasField("n") else 1


def _is_best_of(request: pb.GenerateRequest) -> bool:
    """Raises InvalidRequestError where fewer are computed than are wanted."""
    if not request.sampling.HasField("best_of"):
        return False
    if request.sampling.best_of < _num_chosen(request):
        raise InvalidRequestError(
            f"best_of is {request.sampling.best_of}; it must not be less than n", param="best_of"
        )
    return request.sampling.best_of > _num_chosen(request)


def _decimal(value: Any) -> Any:
    """The number that a client wrote, from the 32-bit float that crossed the wire: as HTTP would have read it."""
    return None if value is None else float(f"{value:.7g}")


def _prompt(request: pb.GenerateRequest) -> str | tuple[int, ...]:
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return tuple(request.token_ids.ids)
        case _:
            raise InvalidRequestError("the request has neither text nor token_ids", param="prompt")


def _response(name: str, delta: Delta) -> pb.GenerateResponse:
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


def _joined(parts: list[pb.GenerateResponse]) -> pb.GenerateResponse:
    """The messages of a stream as one: a choice's tokens, text and log probabilities one behind the other."""
    whole = pb.GenerateResponse()
    choices: dict[int, pb.ChoiceDelta] = {}
    for part in parts:
        for delta in part.choices:
            choice = choices.setdefault(delta.index, pb.ChoiceDelta())
            text = choice.text + delta.text
            choice.MergeFrom(delta)
            choice.text = text
        for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(whole.usage, count, getattr(whole.usage, count) + getattr(part.usage, count))
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
