"""The end of an answer by itself: at a stop token, or at a limit of its length."""

from engine.scheduling.requests.finish import Finish
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus


def finish_after(request: Request, index: int, max_length: int) -> Finish | None:
    """Return how the newest known token, number ``index`` (from 0) of the answer, ends it; None if it does not.

    A stop token counts from ``min_tokens`` on.
    """
    sampling = request.asked.sampling
    token = request.token_ids[-1]
    if token in request.stop_token_ids and index >= sampling.min_tokens:
        reason = token if token in sampling.stop_token_ids else None
        return Finish(RequestStatus.FINISHED_STOPPED, stop_reason=reason)
    if _is_last(request, index, request.num_tokens, max_length):
        return Finish(RequestStatus.FINISHED_LENGTH_CAPPED)
    return None


def ends_with_first_token(request: Request, max_length: int) -> bool:
    """Return whether the token behind the prompt ends the answer, whatever it is."""
    return _is_last(request, request.asked.first_index, request.num_prompt_tokens + 1, max_length)


def ends_with_next_token(request: Request, max_length: int) -> bool:
    """Return whether the next token of an answer ends it, whatever it is."""
    return _is_last(request, request.answer_length, request.num_tokens + 1, max_length)


def stop_tokens(request: Request, max_length: int) -> frozenset[int] | None:
    """Return the tokens that might end the answer as its next one.

    None if any token might: by the answer's length or grammar, or as its first token.
    """
    if (
        ends_with_next_token(request, max_length)
        or request.structured_output_request
        or not request.is_decoding
    ):
        return None
    return request.stop_token_ids


def _is_last(request: Request, index: int, num_tokens: int, max_length: int) -> bool:
    """Return whether token ``index`` of the answer, with which ``num_tokens`` are known, is its last by length."""
    return index + 1 >= request.asked.sampling.max_tokens or num_tokens >= max_length
