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


def generate_request(prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateRequest:
    """A prompt as text or as token ids, and what goes with it."""
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=prompt, **options)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), **options)


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What proves who asks."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
