"""The methods of ``kvbaton.v1.Inference``, which use the same pipeline as HTTP.

Each call has an id, and a boundary at which errors become statuses (``answering``).
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from contract.requests import check_token_ids
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.answers.answer import Delta, choose_best
from router.client_access import ClientAccess
from router.grpc.messages import (
    check_detokenize,
    check_embed,
    check_generate,
    embedding_requests,
    generate_response,
    generation_request,
    is_best_of,
    joined,
    num_chosen,
)
from router.intake.cancellation import client_name
from router.intake.request import new_request_id
from router.intake.request_preparer import encode_text
from router.request_path import RequestPath
from serving.errors import abort
from serving.event_loop import stall_limit
from serving.grpc_messages import authorization_of

logger = logging.getLogger(__name__)
REQUEST_ID_KEY = "x-kvbaton-request-id"
"""Initial metadata: the router's id of a request."""
_NAME_KEY = "x-request-id"


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
        async with (
            answering(context, "emb") as request_id,
            self._named(request, request_id, context) as (name, tenant),
        ):
            # before the message becomes Python objects, which take many times its bytes
            check_embed(request, self._max_model_len())
            requests = embedding_requests(request, request_id, tenant, context.time_remaining())
            found = await self._path.pipeline.embed(*requests)
            usages = [delta.usage for delta in found if delta.usage]
            return pb.EmbedResponse(
                request_id=name,
                embeddings=[pb.Embedding(values=delta.embedding) for delta in found],
                usage=pb.Usage(
                    prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
                    cached_tokens=sum(usage.num_cached_tokens for usage in usages),
                ),
            )

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
        async with self._named(request, request_id, context) as (name, tenant):
            # before the message becomes Python objects, which take many times its bytes
            check_generate(request, self._max_model_len())
            generation = generation_request(request, request_id, tenant, context.time_remaining())
            async with self._path.pipeline.generate(generation) as deltas:
                yield name, deltas

    @asynccontextmanager
    async def _named(
        self, request: pb.GenerateRequest | pb.EmbedRequest, request_id: str, context: Any
    ) -> AsyncIterator[tuple[str, str]]:
        """Yield the request's name for its answer, and its tenant. Within the block its client can cancel it."""
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
        metadata = context.invocation_metadata()
        name = name_of(request, metadata)
        owner = authorization_of(metadata)
        with self._clients.running.open(owner, request_id, name):
            yield name or request_id, self._clients.keys.tenant(owner)


@asynccontextmanager
async def answering(context: Any, id_prefix: str) -> AsyncIterator[str]:
    """Yield a new id for the call, and end the call with the status of an error that is raised within the block."""
    request_id = new_request_id(id_prefix)
    try:
        yield request_id
    except KvbatonError as error:
        await abort(context, error, request_id)
    except Exception:
        logger.exception("%s: unexpected error", request_id)
        internal = InternalError(f"an internal error; the log names it by {request_id}")
        await abort(context, internal, request_id)


def name_of(request: pb.GenerateRequest | pb.EmbedRequest, metadata: Any) -> str | None:
    """Return the client's name for its request. Raises InvalidRequestError for a ``request_id`` that is not a valid name."""
    if not request.request_id:
        given = dict(metadata or ()).get(_NAME_KEY)
        return client_name(given if isinstance(given, str) else None)
    if not client_name(request.request_id):
        raise InvalidRequestError(
            "request_id must be 1 to 64 printable ASCII characters without spaces", param="request_id"
        )
    return request.request_id
