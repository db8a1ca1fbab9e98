"""Client of kvbaton's gRPC API (kvbaton.v1.Inference)."""

from kvbaton_client.async_client import AsyncClient
from kvbaton_client.client import Client
from kvbaton_client.protos.inference_pb2 import (
    ChoiceDelta,
    Embedding,
    EmbedResponse,
    GenerateResponse,
    Model,
    SamplingParams,
)

__all__ = [
    "AsyncClient",
    "ChoiceDelta",
    "Client",
    "EmbedResponse",
    "Embedding",
    "GenerateResponse",
    "Model",
    "SamplingParams",
]
