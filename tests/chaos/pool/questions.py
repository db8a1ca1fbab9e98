"""Requests of every kind that the pool is asked: greedy, seeded, two answers, log probabilities, grammars, tool calls."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tests.chaos.clients import MODEL, VOCABULARY

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
NUM_LOGPROBS = 2


class Kind(StrEnum):
    """The part of the API that a request uses."""

    GREEDY = "greedy"
    SEEDED = "seeded"
    TWO_ANSWERS = "two answers"
    LOGPROBS = "log probabilities"
    GRAMMAR = "grammar"
    TOOLS = "tools"


@dataclass(frozen=True)
class MixedQuestion:
    """One request: its path and its body, without ``stream``."""

    number: int
    kind: Kind
    path: str
    body: dict[str, Any]

    @property
    def num_choices(self) -> int:
        """Number of answers."""
        return int(self.body.get("n", 1))


def draw_mixed(
    rng: random.Random, count: int, longest_answer: int, kinds: Sequence[Kind]
) -> list[MixedQuestion]:
    """Draw questions of these kinds in turn."""
    return [_draw(rng, number, kinds[number % len(kinds)], longest_answer) for number in range(count)]


def _draw(rng: random.Random, number: int, kind: Kind, longest_answer: int) -> MixedQuestion:
    own = {"model": MODEL, "return_token_ids": True, "temperature": 0.0}
    if kind is Kind.TOOLS:
        return MixedQuestion(number, kind, CHATS, own | _tools(rng, longest_answer))
    own["prompt"] = [rng.choice(VOCABULARY) for _ in range(rng.randint(10, 400))]
    if kind is Kind.GRAMMAR:
        num_words = max(2, longest_answer // 8)
        own |= {"guided_regex": f"[a-z]{{3,8}}( [a-z]{{3,8}}){{{num_words}}}", "max_tokens": longest_answer}
        return MixedQuestion(number, kind, COMPLETIONS, own)
    own |= {"max_tokens": rng.randint(longest_answer // 4, longest_answer), "ignore_eos": True}
    if kind in (Kind.SEEDED, Kind.TWO_ANSWERS):
        own |= {"temperature": 0.8, "seed": rng.getrandbits(40)}
    if kind is Kind.TWO_ANSWERS:
        own["n"] = 2
    if kind is Kind.LOGPROBS:
        own["logprobs"] = NUM_LOGPROBS
    return MixedQuestion(number, kind, COMPLETIONS, own)


def _tools(rng: random.Random, longest_answer: int) -> dict[str, Any]:
    num_words = max(2, longest_answer // 16)
    word = {"type": "string", "minLength": 3, "maxLength": 8}
    words = {"type": "array", "items": word, "minItems": num_words, "maxItems": num_words}
    function = {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"words": words},
            "required": ["words"],
            "additionalProperties": False,
        },
    }
    question = f"Look {rng.randint(2, 99)} words up for number {rng.getrandbits(30)}."
    return {
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "max_tokens": longest_answer,
    }
