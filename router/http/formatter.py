"""The interface of the classes that write answers in the objects of one API."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from router.answers.answer import Delta
from router.http.bodies.body import Json

Event = Json | msgspec.Raw
"""An object of a stream, or its JSON."""


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an answer that its client asked for.

    created: Unix seconds. num_choices: answers in total, each with its own last delta. num_chosen: answers to each prompt
    that the client gets. include_usage: add an event with the usage to a stream.
    """

    request_id: str
    model: str
    created: int
    num_choices: int = 1
    num_chosen: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    timings: bool = False
    prompt_logprobs: bool = False


class AnswerFormatter(Protocol):
    """Writes one response. Call ``chunks`` for every delta of a stream, in order, or ``whole`` once."""

    def chunks(self, delta: Delta) -> Sequence[Event]:
        """Return the stream's objects for one delta; none while there is nothing to show."""

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the response object of an answer that is not streamed; each choice's last delta has usage and timings."""
