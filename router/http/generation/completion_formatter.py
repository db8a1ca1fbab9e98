"""OpenAI's ``text_completion``, as a whole and in chunks."""

from collections.abc import Sequence

from router.answers.answer import Delta
from router.http.bodies.body import Json
from router.http.formatter import AnswerOptions, Event
from router.http.generation.echo import PromptView
from router.http.generation.logprobs import LegacyLogprobs, prompt_logprobs
from router.http.generation.openai_formatter import OpenAIFormatter
from text.tokenizer import Tokenizer

_KIND = "text_completion"


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
            return [self._text_chunk(delta.index, delta.text)] if delta.text else []
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
