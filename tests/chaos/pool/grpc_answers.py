"""Mixed questions over gRPC: each on a channel of its own, so that its router is that of one connection."""

import time
from typing import Any

import grpc.aio

from contract.errors import ErrorKind
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from serving.errors import ERROR_KIND_KEY
from tests.chaos.pool.answers import ACCEPTED, ANSWER_SECONDS, UNAVAILABLE, MixedAnswer, Way
from tests.chaos.pool.questions import COMPLETIONS, MixedQuestion

_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]


def can_be_sent(question: MixedQuestion) -> bool:
    """Return whether the gRPC API has such requests: it has no chats, so no tools."""
    return question.path == COMPLETIONS


async def ask_grpc(
    address: str, question: MixedQuestion, *, salt: str = "", seconds: float = ANSWER_SECONDS
) -> MixedAnswer:
    """Call ``Generate``; return the answer, or its beginning before an error."""
    answer = MixedAnswer.empty(question, Way.GRPC)
    async with grpc.aio.insecure_channel(address, _OPTIONS) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        try:
            async for message in stub.Generate(_message(question.body, salt), timeout=seconds):
                answer.status = ACCEPTED
                answer.arrivals.append(time.monotonic())
                for delta in message.choices:
                    _take(answer, delta)
        except grpc.aio.AioRpcError as error:
            kinds = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
            kind = kinds.get(ERROR_KIND_KEY, error.code().name)
            answer.error = f"{kind}: {error.details()}"
            if kind == ErrorKind.UNAVAILABLE and not answer.status:
                answer.status = UNAVAILABLE
    return answer


def _message(body: dict[str, Any], salt: str) -> pb.GenerateRequest:
    names = ("temperature", "seed", "max_tokens", "ignore_eos", "n", "logprobs")
    sampling = pb.SamplingParams(**{name: body[name] for name in names if name in body})
    grammar = pb.AnswerGrammar(regex=body["guided_regex"]) if "guided_regex" in body else None
    ids = pb.TokenIds(ids=body["prompt"])
    return pb.GenerateRequest(token_ids=ids, sampling=sampling, grammar=grammar, cache_salt=salt)


def _take(answer: MixedAnswer, delta: pb.ChoiceDelta) -> None:
    choice = answer.choices[delta.index]
    choice.token_ids += delta.token_ids
    choice.text += delta.text
    choice.logprobs += [each.logprob for each in delta.logprobs]
    if delta.finish_reason:
        choice.finish_reason = pb.FinishReason.Name(delta.finish_reason).rpartition("_")[2].lower()
