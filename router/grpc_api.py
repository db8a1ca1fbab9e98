"""kvbaton.v1.Inference: the same pipeline as HTTP, for internal services."""

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from contract.errors import CancelledError, ErrorKind, InvalidRequestError, KvbatonError
from contract.requests import FinishReason
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.answer import Delta
from router.delivery import Token
from router.pipeline import Pipeline
from router.request import GenerationRequest, new_request_id
from serving.errors import grpc_code

logger = logging.getLogger(__name__)

ERROR_KIND_KEY = "kvbaton-error-kind"
_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Streams answers. A client that cancels, or whose deadline passes, cancels its request on the workers."""

    def __init__(self, pipeline: Pipeline, stall_seconds: float) -> None:
        self._pipeline = pipeline
        self._stall_seconds = stall_seconds

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        """One prompt; the last message has usage and timings. Errors have the codes of ``serving.errors``."""
        request_id = new_request_id("gen")
        name = request.request_id or request_id
        try:
            asked = _asked(request, request_id, context.time_remaining())
            async with aclosing(self._pipeline.generate(asked)) as deltas:
                async for delta in deltas:
                    if delta.tokens or delta.finish_reason:
                        await self._write(context, _response(name, delta))
        except KvbatonError as error:
            await _abort(context, error.kind, error.message)
        except Exception:
            logger.exception("%s: a bug", request_id)
            await _abort(context, ErrorKind.INTERNAL, f"an internal error; the log names it by {request_id}")

    async def _write(self, context: Any, response: pb.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.write(response)
        except TimeoutError:
            raise CancelledError(
                f"the client has read nothing for {self._stall_seconds} s; the request is cancelled"
            ) from None


async def _abort(context: Any, kind: ErrorKind, message: str) -> None:
    await context.abort(grpc_code(kind), message, ((ERROR_KIND_KEY, kind.value),))


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
        ignore_eos=sampling.ignore_eos,
        logprobs=given("logprobs"),
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout_seconds=time_remaining,
    )


def _decimal(value: float | None) -> float | None:
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
