"""The limits on the lists of a message, checked before they become Python objects, which take many times their bytes."""

from collections.abc import Sized

from contract.errors import InvalidRequestError
from contract.sampling import MAX_GRAMMAR_BYTES
from protos import inference_pb2 as pb
from router.intake.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIASES,
    MAX_PROMPT_TOKENS,
    MAX_PROMPTS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)

_MAX_CHOICES = MAX_GRAMMAR_BYTES // 3
"""Most texts of a grammar: each takes at least two quotes and a comma."""


def check_generate(request: pb.GenerateRequest, max_model_len: int) -> None:
    """Raise InvalidRequestError that names the first list that is too long."""
    sampling = request.sampling
    lists: list[tuple[str, Sized, int]] = [
        ("stop", sampling.stop, MAX_STOPS),
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("logit_bias", sampling.logit_bias, MAX_LOGIT_BIASES),
        ("allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
    ]
    if request.grammar.WhichOneof("kind") == "choice":
        lists.append(("grammar.choice", request.grammar.choice.texts, _MAX_CHOICES))
    if request.WhichOneof("prompt") == "token_ids":
        lists.append(("prompt", request.token_ids.ids, max(MAX_PROMPT_TOKENS, max_model_len)))
    for name, held, most in lists:
        if len(held) > most:
            raise InvalidRequestError(f"{name} has {len(held)} entries; the limit is {most}", param=name)


def check_embed(request: pb.EmbedRequest, max_model_len: int) -> None:
    """Raise InvalidRequestError for no inputs, too many inputs, or too many token ids in all of them."""
    if not 1 <= len(request.inputs) <= MAX_PROMPTS:
        raise InvalidRequestError(
            f"inputs has {len(request.inputs)} entries; it must have 1 to {MAX_PROMPTS}", param="inputs"
        )
    most = max(MAX_PROMPT_TOKENS, max_model_len)
    total = sum(len(one.token_ids.ids) for one in request.inputs)
    if total > most:
        raise InvalidRequestError(f"inputs have {total} token ids; the limit is {most}", param="inputs")


def check_detokenize(request: pb.DetokenizeRequest) -> None:
    """Raise InvalidRequestError for too many token ids."""
    if len(request.token_ids) > MAX_PROMPT_TOKENS:
        raise InvalidRequestError(
            f"token_ids has {len(request.token_ids)} entries; the limit is {MAX_PROMPT_TOKENS}",
            param="token_ids",
        )
