"""OpenAI's ``text_completion``, as a whole and in chunks, with the prompt beside its answer.

``echo`` shows the prompt. As in OpenAI's API, ``text_offset`` indexes the prompt's text followed by the answer's, whether
the prompt is shown or not. Tokens of a stop string lie after the end of that text.
"""

import codecs
from collections.abc import Sequence

from msgspec import structs

from contract.errors import InvalidRequestError
from contract.outputs import FinishReason
from router.answers.answer import Delta, Prompt
from router.http.bodies.body import Body, Json
from router.http.exchange import AnswerOptions
from router.http.generation.openai_formatter import LegacyLogprobs, OpenAIFormatter, prompt_logprobs
from router.http.streaming import Event
from router.tokens.delivery import Token
from text.detokenizer import Detokenizer
from text.tokenizer import Tokenizer

_KIND = "text_completion"


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
        # the usual case: nothing but the answer is shown
        if delta.prompt is None and not (self._lengths or self._hides_answer):
            return delta
        if self._hides_answer:
            usage = delta.usage and structs.replace(delta.usage, num_completion_tokens=0)
            reason = delta.finish_reason and FinishReason.LENGTH
            delta = structs.replace(
                delta, text="", tokens=[], usage=usage, finish_reason=reason, stop_reason=None
            )
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


def without_answer(body: Body) -> bool:
    """Return True for ``max_tokens`` 0. Raises InvalidRequestError for it without ``echo``."""
    is_none = body.integer("max_tokens") == 0
    if is_none and not body.flag("echo"):
        raise InvalidRequestError("max_tokens is 0; without echo it must be 1 or more", param="max_tokens")
    return is_none


class CompletionFormatter(OpenAIFormatter):
    """Writes text completions. The last chunk of a stream has the last text and the finish reason."""

    def __init__(self, options: AnswerOptions, tokenizer: Tokenizer, view: PromptView) -> None:
        super().__init__(options, lambda: LegacyLogprobs(tokenizer))
        self._tokenizer = tokenizer
        self._view = view

    def chunks(self, delta: Delta) -> Sequence[Event]:
        """Return one chunk if there is text, a detail or an end to show."""
        delta = self._view.shown(delta, self._tokenizer)
        if not delta.finish_reason:
            if self._shows_tokens and delta.tokens:
                return [self._piece(delta)]
            return [self._text_event(delta.index, delta.text)] if delta.text else []
        return self._finished(_KIND, [self._piece(delta)], delta)

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the response object."""
        shown = [self._view.shown(delta, self._tokenizer) for delta in deltas]
        return self._whole(_KIND, shown, self._whole_choice)

    def _whole_choice(self, deltas: list[Delta]) -> Json:
        choice = self._choice(deltas, {"text": "".join(delta.text for delta in deltas)})
        has_logprobs = self._options.prompt_logprobs
        found = (
            prompt_logprobs(deltas[0].prompt, self._tokenizer) if has_logprobs and deltas[0].prompt else None
        )
        return {**choice, "prompt_logprobs": found}

    def _with_text(self, index: int, text: str) -> Json:
        return self._piece(Delta(index=index, text=text))

    def _piece(self, delta: Delta) -> Json:
        return self._chunk(_KIND, self._choice([delta], {"text": delta.text}))


def text_offsets(text: str, num_tokens: int, tokenizer: Tokenizer) -> list[int]:
    """Return the offset of each token of a prompt that was sent as text.

    White space before a token belongs to it. Tokens of the same character have the same offset. A token that is not in
    the text (a beginning-of-text token) has the offset of the next one.
    """
    found: list[int] = []
    end = 0
    for start, stop in tokenizer.spans(text):
        found.append(min(start, end) if stop > start else end)
        end = max(end, stop)
    return (found + [end] * num_tokens)[:num_tokens]


def token_offsets(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the text, without special tokens, and the offset of each token of a prompt that was sent as token ids."""
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    joined, offsets = _by_bytes(token_ids, tokenizer)
    if joined == text:
        return text, offsets
    # some tokenizers write a space before the first word, and their decoders drop it
    if joined == f" {text}":
        return text, [max(offset - 1, 0) for offset in offsets]
    # the offset of each token by decoding it together with its neighbours
    detokenizer = Detokenizer(tokenizer)
    offsets = []
    end = 0
    for token_id in token_ids:
        offsets.append(min(end, len(text)))
        end += len(detokenizer.push(token_id))
    return text, offsets


def _by_bytes(token_ids: Sequence[int], tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Return the joined texts of the single tokens and their offsets: cheap, and in most cases equal to the decoded text."""
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[str] = []
    offsets: list[int] = []
    end = 0
    for token_id in token_ids:
        offsets.append(end)
        # special tokens are not in the text
        raw = tokenizer.token_bytes(token_id) if tokenizer.has_text(token_id) else b""
        parts.append(characters.decode(raw))
        end += len(parts[-1])
    return "".join([*parts, characters.decode(b"", True)]), offsets
