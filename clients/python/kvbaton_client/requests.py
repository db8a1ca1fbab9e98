"""The requests of both clients."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from kvbaton_client.protos import inference_pb2 as pb

OPTIONS = (("grpc.max_receive_message_length", -1),)


class Options(TypedDict, total=False):
    """Options of a generation, with the names of ``GenerateRequest``."""

    sampling: pb.SamplingParams
    model: str
    request_id: str
    priority: int
    cache_salt: str


class EmbedOptions(TypedDict, total=False):
    """Options of embeddings, with the names of ``EmbedRequest``."""

    dimensions: int
    pooling_type: str
    normalize: bool
    model: str
    request_id: str
    priority: int
    cache_salt: str


def generate_request(prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateRequest:
    """Make the request for a prompt (text or token ids) with options."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, **options)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **options)


def embed_request(prompts: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> pb.EmbedRequest:
    """Make the request for prompts (texts or token ids) with options. Raises TypeError for a single text."""
    if isinstance(prompts, str):
        raise TypeError("prompts is a text; pass a list of prompts")
    return pb.EmbedRequest(inputs=[_embed_input(prompt) for prompt in prompts], **options)


def _embed_input(prompt: str | Sequence[int]) -> pb.EmbedInput:
    if isinstance(prompt, str):
        return pb.EmbedInput(text=prompt)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=prompt))


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata with the API key."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
