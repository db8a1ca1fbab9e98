"""The asynchronous client; ``Client`` is the synchronous one."""

from collections.abc import AsyncGenerator, Sequence
from typing import Self, Unpack

import grpc
import grpc.aio

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


class AsyncClient:
    """A connection to the service at ``address`` ("host:port"), for the event loop in which it is created.

    The arguments are those of ``Client``. Calls raise grpc.aio.AioRpcError; cancelling one cancels the request.
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
            grpc.aio.secure_channel(address, credentials, OPTIONS)
            if credentials
            else grpc.aio.insecure_channel(address, OPTIONS)
        )
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = metadata(api_key)
        self._timeout = timeout_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel its calls."""
        await self._channel.close()

    async def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> pb.GenerateResponse:
        """Return the complete answer to a prompt, text or token ids."""
        request = generate_request(prompt, **options)
        return await self._stub.GenerateOnce(request, timeout=self._timeout, metadata=self._metadata)

    async def stream(
        self, prompt: str | Sequence[int], **options: Unpack[Options]
    ) -> AsyncGenerator[pb.GenerateResponse]:
        """Stream the answer; the last message has usage and timings. Closing the iterator cancels the request."""
        request = generate_request(prompt, **options)
        call = self._stub.Generate(request, timeout=self._timeout, metadata=self._metadata)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def embed(
        self, prompts: Sequence[str | Sequence[int]], **options: Unpack[EmbedOptions]
    ) -> pb.EmbedResponse:
        """Return the embedding of each prompt, text or token ids, in order; all or none."""
        request = embed_request(prompts, **options)
        return await self._stub.Embed(request, timeout=self._timeout, metadata=self._metadata)

    async def cancel(self, request_id: str) -> int:
        """Cancel the running requests with this id or name and the same key; return their number."""
        request = pb.CancelGenerationRequest(request_id=request_id)
        return (
            await self._stub.Cancel(request, timeout=self._timeout, metadata=self._metadata)
        ).num_cancelled

    async def tokenize(self, text: str, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        request = pb.TokenizeRequest(model=model, text=text, no_special_tokens=not add_special_tokens)
        answer = await self._stub.Tokenize(request, timeout=self._timeout, metadata=self._metadata)
        return list(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """Return the text of token ids, including special tokens."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return (await self._stub.Detokenize(request, timeout=self._timeout, metadata=self._metadata)).text

    async def models(self) -> list[pb.Model]:
        """Return the served models; empty while no worker is attached."""
        answer = await self._stub.ListModels(
            pb.ListModelsRequest(), timeout=self._timeout, metadata=self._metadata
        )
        return list(answer.models)
