"""OpenAI's ``chat.completion``, as a whole and in chunks: content, reasoning and tool calls of the assistant's message."""

from collections.abc import Container, Iterator, Sequence

from contract.outputs import FinishReason
from router.answers.answer import Delta
from router.http.bodies.body import Json
from router.http.exchange import AnswerOptions
from router.http.generation.openai_formatter import ChatLogprobs, OpenAIFormatter, prompt_logprobs
from router.http.streaming import Event
from text.parsing.parser import CallBegin, CallPiece
from text.tokenizer import Tokenizer
from text.tools import TextArgument, argument_text

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
        has_more = (
            delta.reasoning or delta.calls or delta.finish_reason or (self._shows_tokens and delta.tokens)
        )
        if delta.index in self._begun and not has_more:
            # nearly every delta of a stream; only its text is encoded
            return [self._text_event(delta.index, delta.text)] if delta.text else []
        out = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            self._calls[delta.index] = CallDeltas(self._custom)
            out.append(self._bare({"role": "assistant", "content": ""}, Delta(index=delta.index)))
        calls = self._calls[delta.index]
        parts: list[Json] = [_reasoning(delta.reasoning)] if delta.reasoning else []
        if delta.text:
            parts.append({"content": delta.text})
        # each entry has a part of its own: a call's name and its arguments come separately
        parts += [{"tool_calls": [call]} for piece in delta.calls for call in calls.written(piece)]
        parts += [{"tool_calls": [call]} for call in (calls.rest() if delta.finish_reason else ())]
        if not parts and self._shows_tokens and delta.tokens:
            parts = [{"content": ""}]
        for number, part in enumerate(parts):
            # the first chunk shows the tokens, so that none is shown twice
            if number == 0:
                piece = Delta(index=delta.index, tokens=delta.tokens)
                out.append(self._chunk(_CHUNK, self._choice([piece], {"delta": part})))
            else:
                out.append(self._bare(part, Delta(index=delta.index)))
        if delta.calls:
            self._called.add(delta.index)
        if not delta.finish_reason:
            return out
        return self._finished(_CHUNK, [*out, self._bare({}, delta)], delta)

    def _with_text(self, index: int, text: str) -> Json:
        return self._chunk(_CHUNK, self._choice([Delta(index=index)], {"delta": {"content": text}}))

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


def whole_message(deltas: list[Delta], custom: Container[str] = ()) -> Json:
    """Return the message of all deltas of a choice; its content is null if there is only reasoning or calls.

    custom: names of custom tools.
    """
    content = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls: dict[int, Json] = {}
    for piece in (piece for delta in deltas for piece in delta.calls):
        if isinstance(piece, CallBegin):
            calls[piece.index] = _call(piece)
        else:
            calls[piece.index]["function"]["arguments"] += piece.text
    for index, call in calls.items():
        function = call["function"]
        if function["name"] in custom:
            calls[index] = _custom_call(call["id"], function["name"], argument_text(function["arguments"]))
    is_empty = not content and (reasoning or calls)
    message: Json = {"role": "assistant", "content": None if is_empty else content, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


class CallDeltas:
    """Writes the calls of one choice of a stream. Owns the text of the calls of custom tools, by index.

    custom: names of custom tools.
    """

    def __init__(self, custom: Container[str]) -> None:
        self._custom = custom
        self._texts: dict[int, TextArgument] = {}

    def written(self, piece: CallPiece) -> Iterator[Json]:
        """Yield the entries of ``tool_calls`` for a piece."""
        if isinstance(piece, CallBegin):
            # a call begins, so the one before it is complete
            yield from self.rest()
            if piece.name in self._custom:
                self._texts[piece.index] = TextArgument()
                yield {"index": piece.index, **_custom_call(piece.call_id, piece.name, "")}
            else:
                yield {"index": piece.index, **_call(piece)}
        elif (text := self._texts.get(piece.index)) is None:
            yield {"index": piece.index, "function": {"arguments": piece.text}}
        elif shown := text.push(piece.text):
            yield {"index": piece.index, "custom": {"input": shown}}

    def rest(self) -> Iterator[Json]:
        """Yield the texts that were held back, when another call begins or the answer ends."""
        for index, text in self._texts.items():
            if shown := text.flush():
                yield {"index": index, "custom": {"input": shown}}


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}  # clients look for either name


def _call(begin: CallBegin) -> Json:
    return {"id": begin.call_id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


def _custom_call(call_id: str, name: str, text: str) -> Json:
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}
