"""``echo``: a completion's prompt stands before its answer, in the text, the token ids and the log probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from contract.errors import InvalidRequestError
from contract.requests import FinishReason
from router.answer import Delta
from router.http.body import Body
from router.request import GenerationRequest
from text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Echo:
    """What is shown before the answers.

    texts: each prompt as the client wrote it, None for token ids. num_chosen: answers to each prompt. hides_answer: the
    client wants no tokens; the one that was drawn all the same is not shown.
    """

    texts: Sequence[str | None]
    num_chosen: int
    hides_answer: bool

    def shown(self, delta: Delta, tokenizer: Tokenizer) -> Delta:
        """The delta as the client sees it."""
        if self.hides_answer:
            usage = delta.usage and replace(delta.usage, num_completion_tokens=0)
            reason = delta.finish_reason and FinishReason.LENGTH
            delta = replace(delta, text="", tokens=[], usage=usage, finish_reason=reason, stop_reason=None)
        if delta.prompt is None:
            return delta
        text = self.texts[delta.index // self.num_chosen]
        if text is None:
            text = tokenizer.decode(delta.prompt.token_ids, skip_special_tokens=True)
        return replace(delta, text=text + delta.text, tokens=[*delta.prompt.tokens, *delta.tokens])


def without_answer(body: Body) -> bool:
    """True for ``max_tokens`` 0, which makes sense with echo only. Raises InvalidRequestError without it."""
    is_none = body.integer("max_tokens") == 0
    if is_none and not body.flag("echo"):
        raise InvalidRequestError("max_tokens is 0; without echo it must be 1 or more", param="max_tokens")
    return is_none


def echo_of(body: Body, asked: Sequence[GenerationRequest], num_chosen: int) -> Echo | None:
    """What to show before the answers; None where the client asks for no echo."""
    if not body.flag("echo"):
        return None
    texts = [one.prompt if isinstance(one.prompt, str) else None for one in asked]
    return Echo(texts, num_chosen, without_answer(body))
