"""OpenAI's ``chat.completion``, as a whole and in chunks."""

from collections.abc import Container, Sequence

from contract.outputs import FinishReason
from router.answers.answer import Delta
from router.http.bodies.body import Json
from router.http.formatter import AnswerOptions, Event
from router.http.generation.logprobs import ChatLogprobs, prompt_logprobs
from router.http.generation.message import CallDeltas, message_deltas, whole_message
from router.http.generation.openai_formatter import OpenAIFormatter
from text.tokenizer import Tokenizer

_CHUNK = "chat.completion.chunk"


class ChatFormatter(OpenAIFormatter):
    """Writes chats. The first chunk of a stream has the role, the last one has no text but the finish reason.

    Content, reasoning, a call's name and its arguments come in separate chunks. names_call: the client has named the
    function to call; OpenAI then reports the finish reason "stop" instead of "tool_calls". custom: names of custom tools.
    """

    def __init__(
        self,
        options: AnswerOptions,
        tokenizer: Tokenizer,
        *,
        names_call: bool = False,
        custom: Container[str] = (),
    ) -> None:
        super().__init__(options, lambda: ChatLogprobs(tokenizer))
        self._tokenizer = tokenizer
        self._names_call = names_call
        self._begun: set[int] = set()
        self._called: set[int] = set()
        self._custom = custom
        self._calls: dict[int, CallDeltas] = {}

    def chunks(self, delta: Delta) -> Sequence[Event]:
        """Return the chunk with the role (once), one for each kind of content in the delta, and one for the end."""
        if self._is_text_only(delta):
            return [self._text_chunk(delta.index, delta.text)] if delta.text else []
        out = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            self._calls[delta.index] = CallDeltas(self._custom)
            out.append(self._bare({"role": "assistant", "content": ""}, Delta(index=delta.index)))
        parts = message_deltas(delta, self._calls[delta.index])
        if not parts and self._shows_tokens and delta.tokens:
            parts = [{"content": ""}]
        for number, part in enumerate(parts):
            piece = Delta(index=delta.index, tokens=delta.tokens)
            out.append(
                self._piece(piece, part) if number == 0 else self._bare(part, Delta(index=delta.index))
            )
        if delta.calls:
            self._called.add(delta.index)
        if not delta.finish_reason:
            return out
        return self._finished(_CHUNK, [*out, self._bare({}, delta)], delta)

    def _is_text_only(self, delta: Delta) -> bool:
        has_more = (
            delta.reasoning or delta.calls or delta.finish_reason or (self._shows_tokens and delta.tokens)
        )
        return delta.index in self._begun and not has_more

    def _with_text(self, index: int, text: str) -> Json:
        return self._piece(Delta(index=index), {"content": text})

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the response object."""
        whole = self._whole("chat.completion", deltas, self._whole_choice)
        if self._options.prompt_logprobs and deltas[0].prompt:
            whole["prompt_logprobs"] = prompt_logprobs(deltas[0].prompt, self._tokenizer)
        return whole

    def _whole_choice(self, deltas: list[Delta]) -> Json:
        has_calls = any(delta.calls for delta in deltas)
        choice = self._choice(deltas, {"message": whole_message(deltas, self._custom)})
        return {**choice, "finish_reason": _finish_reason(deltas[-1], has_calls and not self._names_call)}

    def _piece(self, delta: Delta, content: Json) -> Json:
        return self._chunk(_CHUNK, self._choice([delta], {"delta": content}))

    def _bare(self, delta_object: Json, delta: Delta) -> Json:
        """Return a chunk without the details of tokens."""
        choice = {
            "index": delta.index,
            "delta": delta_object,
            "logprobs": None,
            "finish_reason": _finish_reason(delta, delta.index in self._called and not self._names_call),
        }
        if delta.finish_reason:
            choice["stop_reason"] = delta.stop_reason
        return self._chunk(_CHUNK, choice)


def _finish_reason(delta: Delta, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and delta.finish_reason is FinishReason.STOP else delta.finish_reason
