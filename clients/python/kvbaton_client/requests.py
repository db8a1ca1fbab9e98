"""What both clients send."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from kvbaton_client.protos import inference_pb2 as pb

OPTIONS = (("grpc.max_receive_message_length", -1),)


class Options(TypedDict, total=False):
    """What may go with a prompt, by the names of ``GenerateRequest``."""

    sampling: pb.SamplingParams
    model: str
    request_id: str
    priority: int
    cache_salt: str


class EmbedOptions(TypedDict, total=False):
    """What may go with prompts to embed, by the names of ``EmbedRequest``."""

    dimensions: int
    model: str
    request_id: str
    priority: int
    cache_salt: str


def generate_request(prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateRequest:
    """A prompt as text or as token ids, and what goes with it."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, **options)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **options)


def embed_request(prompts: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]) -> pb.EmbedRequest:
    """Prompts as texts or as token ids, and what goes with them. Raises TypeError for a text alone."""
    if isinstance(prompts, str):
        raise TypeError("prompts is one text; give a list of prompts")
    return pb.EmbedRequest(inputs=[_embed_input(prompt) for prompt in prompts], **options)


def _embed_input(prompt: str | Sequence[int]) -> pb.EmbedInput:
    if isinstance(prompt, str):
        return pb.EmbedInput(text=prompt)
    return pb.EmbedInput(token_ids=pb.TokenIds(ids=prompt))


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What proves who asks."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
