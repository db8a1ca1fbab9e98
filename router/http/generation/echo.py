"""The prompt of a completion beside its answer: ``echo`` shows it, and offsets count from its beginning.

As in OpenAI's API, ``text_offset`` indexes the prompt's text followed by the answer's, whether the prompt is shown or not.
Tokens of a stop string lie after the end of that text.
"""

from collections.abc import Sequence

from msgspec import structs

from contract.errors import InvalidRequestError
from contract.outputs import FinishReason
from router.answers.answer import Delta, Prompt
from router.http.bodies.body import Body
from router.http.generation.offsets import text_offsets, token_offsets
from router.intake.request import GenerationRequest
from router.tokens.delivery import Token
from text.tokenizer import Tokenizer


class PromptView:
    """The deltas of completions as their client sees them. Owns the length of each choice's prompt in characters.

    texts: each prompt as the client wrote it, None for token ids. num_chosen: answers to each prompt. is_shown: show the
    prompt before the answer. hides_answer: hide the one token that was computed although the client asked for none.
    has_offsets: compute offsets.
    """

    def __init__(
        self,
        texts: Sequence[str | None],
        num_chosen: int,
        *,
        is_shown: bool,
        hides_answer: bool,
        has_offsets: bool,
    ) -> None:
        self._texts = texts
        self._num_chosen = num_chosen
        self._is_shown = is_shown
        self._hides_answer = hides_answer
        self._has_offsets = has_offsets
        self._lengths: dict[int, int] = {}

    def shown(self, delta: Delta, tokenizer: Tokenizer) -> Delta:
        """Return the delta as the client sees it."""
        if delta.prompt is None and not (self._lengths or self._hides_answer):
            return delta
        if self._hides_answer:
            delta = _without_answer(delta)
        if delta.prompt is None or not (self._is_shown or self._has_offsets):
            return self._after_prompt(delta)
        text, tokens = self._read(delta.index, delta.prompt, tokenizer)
        self._lengths[delta.index] = len(text)
        delta = self._after_prompt(delta)
        if not self._is_shown:
            return delta
        return structs.replace(delta, text=text + delta.text, tokens=[*tokens, *delta.tokens])

    def _after_prompt(self, delta: Delta) -> Delta:
        """Return the delta with the offsets of its tokens counted from the beginning of the prompt."""
        length = self._lengths.get(delta.index, 0)
        if not length:
            return delta
        tokens = [structs.replace(token, text_offset=length + token.text_offset) for token in delta.tokens]
        return structs.replace(delta, tokens=tokens)

    def _read(self, index: int, prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, list[Token]]:
        """Return the prompt's text and tokens, with offsets if the prompt is shown."""
        text = self._texts[index // self._num_chosen]
        if not (self._is_shown and self._has_offsets):
            decoded = tokenizer.decode(prompt.token_ids, skip_special_tokens=True) if text is None else text
            return decoded, prompt.tokens
        if text is None:
            text, offsets = token_offsets(prompt.token_ids, tokenizer)
        else:
            offsets = text_offsets(text, len(prompt.token_ids), tokenizer)
        pairs = zip(prompt.tokens, offsets, strict=True)
        return text, [structs.replace(token, text_offset=offset) for token, offset in pairs]


def _without_answer(delta: Delta) -> Delta:
    usage = delta.usage and structs.replace(delta.usage, num_completion_tokens=0)
    reason = delta.finish_reason and FinishReason.LENGTH
    return structs.replace(delta, text="", tokens=[], usage=usage, finish_reason=reason, stop_reason=None)


def without_answer(body: Body) -> bool:
    """Return True for ``max_tokens`` 0. Raises InvalidRequestError for it without ``echo``."""
    is_none = body.integer("max_tokens") == 0
    if is_none and not body.flag("echo"):
        raise InvalidRequestError("max_tokens is 0; without echo it must be 1 or more", param="max_tokens")
    return is_none


def prompt_view(
    requests: Sequence[GenerationRequest], num_chosen: int, *, is_shown: bool, hides_answer: bool
) -> PromptView:
    """Return the view of these requests, one for each prompt. The other arguments are those of PromptView."""
    return PromptView(
        [one.prompt if isinstance(one.prompt, str) else None for one in requests],
        num_chosen,
        is_shown=is_shown,
        hides_answer=hides_answer,
        has_offsets=requests[0].logprobs is not None,
    )
