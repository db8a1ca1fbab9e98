"""The messages of a chat, and the next request."""

import asyncio
from collections.abc import Mapping
from typing import Any

from cli.answer_stream import OnText, StreamedAnswer, stream_chat
from cli.ask import TIMING_PARTS
from cli.endpoint import Endpoint
from contract.errors import KvbatonError


class Conversation:
    """Owns the messages. body: fields of every request (model, temperature, ...). last: the last complete answer."""

    def __init__(self, endpoint: Endpoint, body: Mapping[str, Any], system: str | None = None) -> None:
        self.system = system
        self.last: StreamedAnswer | None = None
        self._endpoint = endpoint
        self._body = dict(body)
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that precede the next question."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self._turns]

    def reset(self) -> None:
        """Clear the conversation; the system message stays."""
        self._turns.clear()

    async def ask(self, text: str, on_text: OnText) -> StreamedAnswer:
        """Send a message with the conversation so far. ``on_text`` gets the pieces of the answer.

        The text of a cancelled answer is kept; a question that failed or got no text is dropped. Raises KvbatonError as
        ``stream_chat`` does.
        """
        pieces: list[str] = []

        def receive(piece: str) -> None:
            pieces.append(piece)
            on_text(piece)

        question = {"role": "user", "content": text}
        try:
            answer = await stream_chat(
                self._endpoint, {**self._body, "messages": [*self.messages, question]}, receive
            )
        except asyncio.CancelledError:
            if pieces:
                self._keep(question, "".join(pieces))
            raise
        self._keep(question, answer.text)
        self.last = answer
        return answer

    def stats(self) -> str:
        """Return the latency breakdown of the last answer, in one line. Raises KvbatonError if there is no answer."""
        if self.last is None:
            raise KvbatonError("there is no complete answer yet")
        answer = self.last
        counts = f"{answer.num_prompt_tokens} tokens in, {answer.num_completion_tokens} out ({answer.finish_reason})"
        if not answer.timings:
            return f"{counts}; the service sent no timings"
        parts = {name: answer.timings[name] * 1000 for name in TIMING_PARTS if name in answer.timings}
        total = answer.timings.get("end_to_end", 0.0) * 1000
        hidden = answer.timings.get("transfer_hidden", 0.0) * 1000
        shown = " + ".join(f"{name.replace('_', ' ')} {part:.1f}" for name, part in parts.items())
        return f"{shown} = {total:.1f} ms (transfer hidden {hidden:.1f}); {counts}"

    def _keep(self, question: dict[str, str], answer: str) -> None:
        self._turns += [question, {"role": "assistant", "content": answer}]
