"""``GenerateResponse`` messages, made of the pipeline's deltas."""

from contract.outputs import FinishReason
from protos import inference_pb2 as pb
from router.answers.answer import Delta
from router.tokens.delivery import Token

_FINISH = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}


def generate_response(name: str, delta: Delta) -> pb.GenerateResponse:
    """Return the message for one delta. name: of the request."""
    choice = pb.ChoiceDelta(
        index=delta.index,
        token_ids=[token.token_id for token in delta.tokens],
        text=delta.text,
        logprobs=[_logprob(token) for token in delta.tokens if token.logprobs],
        prompt_logprobs=[
            _logprob(token) for token in (delta.prompt.tokens if delta.prompt else ()) if token.logprobs
        ],
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


def joined(parts: list[pb.GenerateResponse]) -> pb.GenerateResponse:
    """Return the messages of a stream as one: a choice's tokens, text and log probabilities are concatenated."""
    whole = pb.GenerateResponse()
    choices: dict[int, pb.ChoiceDelta] = {}
    for part in parts:
        for delta in part.choices:
            choice = choices.setdefault(delta.index, pb.ChoiceDelta())
            text = choice.text + delta.text
            choice.MergeFrom(delta)
            choice.text = text
        for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            setattr(whole.usage, count, getattr(whole.usage, count) + getattr(part.usage, count))
        part.ClearField("choices")
        part.ClearField("usage")
        whole.MergeFrom(part)
    whole.choices.extend(choices[index] for index in sorted(choices))
    return whole


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
