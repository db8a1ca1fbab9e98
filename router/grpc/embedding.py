"""The messages of ``Embed``: parsed into the pipeline's requests, and made of its deltas."""

from protos import inference_pb2 as pb
from router.answers.answer import Delta
from router.grpc.prompts import prompt_of
from router.intake.request import EmbeddingRequest, for_prompts


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
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=tenant,
        timeout_seconds=time_remaining,
    )
    return for_prompts(one, others)


def embed_response(name: str, found: list[Delta]) -> pb.EmbedResponse:
    """Return all embeddings and the sum of their usage. name: of the request."""
    usages = [delta.usage for delta in found if delta.usage]
    return pb.EmbedResponse(
        request_id=name,
        embeddings=[pb.Embedding(values=delta.embedding) for delta in found],
        usage=pb.Usage(
            prompt_tokens=sum(usage.num_prompt_tokens for usage in usages),
            cached_tokens=sum(usage.num_cached_tokens for usage in usages),
        ),
    )
