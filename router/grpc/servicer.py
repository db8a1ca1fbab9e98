"""The methods of ``kvbaton.v1.Inference``, which use the same pipeline as HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from contract.errors import InvalidRequestError
from contract.requests import check_token_ids
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.answers.answer import Delta
from router.answers.best_of import choose_best
from router.client_access import ClientAccess
from router.grpc.calls import REQUEST_ID_KEY, answering, name_of
from router.grpc.embedding import embed_response, embedding_requests
from router.grpc.generate_request import generation_request, is_best_of, num_chosen
from router.grpc.generate_response import generate_response, joined
from router.grpc.limits import check_detokenize, check_embed, check_generate
from router.intake.tokenizing import encode_text
from router.request_path import RequestPath
from serving.grpc_keys import authorization_of
from serving.stall_limit import stall_limit


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Answers calls. A client that cancels its call, or whose deadline passes, cancels its request.

    stall_seconds: how long a client may read nothing of a stream.
    """

    def __init__(self, path: RequestPath, clients: ClientAccess, stall_seconds: float) -> None:
        self._path = path
        self._models = path.models
        self._clients = clients
        self._stall_seconds = stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """Stream the answers to one prompt; the last message of each has usage and timings."""
        async with (
            answering(context, "gen") as request_id,
            stall_limit(self._stall_seconds) as limit,
            self._deltas(request, request_id, context) as (name, deltas),
        ):
            if is_best_of(request):
                raise InvalidRequestError(
                    "best_of above n chooses from whole answers; call GenerateOnce", param="best_of"
                )
            async for delta in deltas:
                if delta.tokens or delta.finish_reason:
                    await limit.write(context.write(generate_response(name, delta)))

    async def GenerateOnce(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:  # noqa: N802
        """Return the answers of ``Generate`` in one message."""
        async with (
            answering(context, "gen") as request_id,
            self._deltas(request, request_id, context) as (name, deltas),
        ):
            found = [delta async for delta in deltas]
            if is_best_of(request):
                found = choose_best(found, num_chosen(request), request.sampling.best_of)
            return joined([generate_response(name, delta) for delta in found])

    async def Embed(self, request: pb.EmbedRequest, context: Any) -> pb.EmbedResponse:  # noqa: N802
        """Return the embeddings of all inputs, or an error."""
        async with answering(context, "emb") as request_id:
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            metadata = context.invocation_metadata()
            name = name_of(request, metadata)
            tenant = self._clients.keys.tenant(authorization_of(metadata))
            check_embed(request, self._max_model_len())
            requests = embedding_requests(request, request_id, tenant, context.time_remaining())
            with self._clients.running.open(authorization_of(metadata), request_id, name):
                return embed_response(name or request_id, await self._path.pipeline.embed(*requests))

    async def Cancel(  # noqa: N802
        self, request: pb.CancelGenerationRequest, context: Any
    ) -> pb.CancelGenerationResponse:
        """Cancel the caller's requests that have this id or name."""
        answer = pb.CancelGenerationResponse()
        async with answering(context, "cancel"):
            if not request.request_id:
                raise InvalidRequestError("request_id is missing: an id or a name", param="request_id")
            owner = authorization_of(context.invocation_metadata())
            answer.num_cancelled = self._clients.running.cancel(owner, request.request_id)
        return answer

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """Return the token ids of a text, by default with the special tokens that the tokenizer adds."""
        answer = pb.TokenizeResponse()
        async with answering(context, "tok"):
            card = self._models.card_named(request.model)
            length = self._path.registry.max_model_len(card.max_model_len)
            text = request.text
            has_special = not request.no_special_tokens
            encode = partial(encode_text, card.tokenizer, text, length, has_special)
            answer.token_ids.extend(await self._path.tokenizers.run(len(text), encode))
        return answer

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        """Return the text of token ids, special tokens included."""
        answer = pb.DetokenizeResponse()
        async with answering(context, "detok"):
            card = self._models.card_named(request.model)
            check_detokenize(request)
            check_token_ids(request.token_ids, card.vocab_size, param="token_ids")
            decode = partial(card.tokenizer.decode, request.token_ids, skip_special_tokens=False)
            answer.text = await self._path.tokenizers.run(len(request.token_ids), decode)
        return answer

    async def ListModels(self, _: pb.ListModelsRequest, _context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """Return the served model; none while it is not known yet."""
        if not self._models.is_known:
            return pb.ListModelsResponse()
        card = self._models.card()
        registry = self._path.registry
        length = registry.max_model_len(card.max_model_len)
        model = pb.Model(name=card.name, max_model_len=length, embeds_only=registry.embeds_only)
        return pb.ListModelsResponse(models=[model])

    def _max_model_len(self) -> int:
        if not self._models.is_known:
            return 0
        return self._path.registry.max_model_len(self._models.card().max_model_len)

    @asynccontextmanager
    async def _deltas(
        self, request: pb.GenerateRequest, request_id: str, context: Any
    ) -> AsyncIterator[tuple[str, AsyncIterator[Delta]]]:
        """Yield the request's name for its answer, and the answer."""
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        metadata = context.invocation_metadata()
        name = name_of(request, metadata)
        tenant = self._clients.keys.tenant(authorization_of(metadata))
        check_generate(request, self._max_model_len())
        generation = generation_request(request, request_id, tenant, context.time_remaining())
        with self._clients.running.open(authorization_of(metadata), request_id, name):
            async with self._path.pipeline.generate(generation) as deltas:
                yield name or request_id, deltas
