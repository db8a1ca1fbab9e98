"""The synchronous client; ``AsyncClient`` is the asynchronous one."""

from collections.abc import Generator, Sequence
from typing import Self, Unpack

import grpc

from kvbaton_client.protos import inference_pb2 as pb
from kvbaton_client.protos import inference_pb2_grpc
from kvbaton_client.requests import (
    OPTIONS,
    EmbedOptions,
    Options,
    embed_request,
    generate_request,
    metadata,
)


class Client:
    """A connection to the service at ``address`` ("host:port"). Thread-safe.

    credentials: for a service with TLS (``grpc.ssl_channel_credentials()``); None: without TLS. timeout_seconds: time limit
    of each call; None: only the service's own limits. Calls raise grpc.RpcError.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9000",
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self._channel = (
            grpc.secure_channel(address, credentials, OPTIONS)
            if credentials
            else grpc.insecure_channel(address, OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = metadata(api_key)
        self._timeout = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel its calls."""
        self._channel.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateResponse:
        """Return the complete answer to a prompt, text or token ids."""
        request = generate_request(prompt, **options)
        return self._stub.GenerateOnce(request, timeout=self._timeout, metadata=self._metadata)

    def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> Generator[pb.GenerateResponse]:
        """Stream the answer; the last message has usage and timings. Closing the iterator cancels the request."""
        request = generate_request(prompt, **options)
        call = self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata)
        try:
            yield from call
        finally:
            call.cancel()

    def embed(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """Return the embedding of each prompt, text or token ids, in order; all or none."""
        request = embed_request(prompts, **options)
        return self._stub.Embed(request, timeout=self._timeout, metadata=self._metadata)

    def cancel(self, request_id: str) -> int:
        """Cancel the running requests with this id or name and the same key; return their number."""
        request = pb.CancelGenerationRequest(request_id=request_id)
        return self._stub.Cancel(request, timeout=self._timeout, metadata=self._metadata).num_cancelled

    def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        request = pb.TokenizeRequest(model=model, text=text, no_special_tokens=not add_special_tokens)
        answer = self._stub.Tokenize(request, timeout=self._timeout, metadata=self._metadata)
        return list(answer.token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids, including special tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata).text

    def models(self) -> list[pb.Model]:
        """Return the served models; empty while no worker is attached."""
        answer = self._stub.ListModels(pb.ListModelsRequest(), timeout=self._timeout, metadata=self._metadata)
        return list(answer.models)
