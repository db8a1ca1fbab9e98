"""The demo model's data: in-context recall over long prompts, repeating, small sums and small talk.

A *fact* is one line, ``key: value``. A prompt scatters facts among filler sentences and ends with a question for
one key; the answer repeats the key and then names its value. The key comes first on purpose: it is the token that a
prefill worker samples, so the value is always computed by the decode worker from KV that was handed over, and a
damaged block of KV shows as a wrong answer.

Every batch is a function of (seed, step), so that training can be resumed anywhere. Many questions per sequence
make recall learnable within minutes ("multi-query associative recall", Arora et al. 2023, Zoology).
"""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from examples.demo_model.phrases import Phrases
from examples.demo_model.words import NOUNS

TEXT_WEIGHT = 0.03

_Choice = TypeVar("_Choice")


@dataclass
class Document:
    """A growing sequence of token ids, each with the weight of its loss."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float = TEXT_WEIGHT) -> None:
        """Append ``ids``, all of one weight."""
        self.ids += ids
        self.weights += [weight] * len(ids)


@dataclass(frozen=True)
class RecallPrompt:
    """One prompt of exactly the requested length, and the expected answer.

    ``token_ids`` is the whole chat prompt, including the generation prompt; ``answer_block`` is the index of the KV
    block of the requested value.
    """

    token_ids: list[int]
    answer: str
    answer_block: int


class DemoData:
    """Makes training batches and held-out recall prompts in the ids of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._phrases = Phrases(tokenizer)

    def batch(self, seed: int, step: int, num_rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids and loss weights, both ``[num_rows, length + 1]``; equal for equal arguments."""
        rng = np.random.default_rng([seed, step])
        ids = np.zeros((num_rows, length + 1), dtype=np.int64)
        weights = np.zeros((num_rows, length + 1), dtype=np.float32)
        for row in range(num_rows):
            document = Document()
            kind = rng.random()
            if kind < 0.15:
                self._add_skills(rng, document, length + 1)
            elif kind < (0.6 if length <= 128 else 0.25):
                self._add_drill(rng, document, length + 1)
            else:
                self._add_recall(rng, document, length + 1)
            ids[row] = document.ids[: length + 1]
            weights[row] = document.weights[: length + 1]
        return ids, weights

    def recall_prompt(
        self,
        rng: np.random.Generator,
        num_tokens: int,
        block: int | None = None,
        block_size: int = 16,
    ) -> RecallPrompt:
        """Make a prompt of ``num_tokens`` tokens whose answer is in KV block ``block`` (random if None).

        Raises ValueError for a block without an answer, such as that of the question.
        """
        body_end = num_tokens - len(self._question(0)) - len(self._phrases.to_answer)
        num_blocks = (body_end - 1) // block_size
        chosen = int(rng.integers(0, num_blocks)) if block is None else block
        if not 0 <= chosen < num_blocks:
            raise ValueError(f"block {chosen} contains no answer: choose one of 0..{num_blocks - 1}")
        while True:
            document = Document()
            facts = self._add_body(rng, document, body_end, float(rng.uniform(0.0, 0.6)), 0.0)
            found = [fact for fact in facts if fact[2] // block_size == chosen]
            if not found:
                continue
            key, value, _ = found[int(rng.integers(0, len(found)))]
            document.add(self._question(key) + self._phrases.to_answer)
            return RecallPrompt(document.ids, f"{NOUNS[key]}: {NOUNS[value]}", chosen)

    def _add_recall(self, rng: np.random.Generator, document: Document, length: int) -> None:
        """Add a body of facts, then as many questions about them as fit."""
        body_end = min(int(length * rng.uniform(0.4, 0.92)), length - 16)
        repeats = float(rng.choice([0.0, 0.3, 0.6]))
        facts = self._add_body(rng, document, body_end, float(rng.uniform(0.0, 0.6)), repeats)
        while True:
            key, value, _ = facts[int(rng.integers(0, len(facts)))]
            document.add(self._question(key) + self._phrases.to_answer)
            document.add(
                [
                    self._phrases.keys[key],
                    self._phrases.colon,
                    self._phrases.values[value],
                    self._phrases.end[0],
                ],
                1.0,
            )
            document.add([self._phrases.end[1]])
            if len(document.ids) >= length:
                return
            document.add(self._phrases.user)

    def _add_drill(self, rng: np.random.Generator, document: Document, length: int) -> None:
        """Add some facts, then repeat them in random order: the densest form of recall."""
        document.add(self._phrases.bos + self._phrases.user)
        num_facts = int(rng.integers(2, max(length // 12, 3)))
        keys = rng.permutation(len(NOUNS))[:num_facts].tolist()
        values = rng.integers(0, len(NOUNS), size=num_facts).tolist()
        for key, value in zip(keys, values, strict=True):
            document.add(
                [
                    self._phrases.keys[key],
                    self._phrases.colon,
                    self._phrases.values[value],
                    self._phrases.newline,
                ],
                TEXT_WEIGHT,
            )
        while len(document.ids) < length:
            index = int(rng.integers(0, num_facts))
            document.add([self._phrases.keys[keys[index]], self._phrases.colon])
            document.add([self._phrases.values[values[index]]], 1.0)
            document.add([self._phrases.newline])

    def _add_body(
        self, rng: np.random.Generator, document: Document, end: int, filler: float, repeats: float
    ) -> list[tuple[int, int, int]]:
        """Add the user's turn up to position ``end`` and return its facts (key, value, position); some are repeated."""
        document.add(self._phrases.bos + self._phrases.user)
        facts: list[tuple[int, int, int]] = []
        keys = rng.permutation(len(NOUNS)).tolist()
        while (room := end - len(document.ids)) > 0:
            again = len(facts) > 1 and rng.random() < repeats
            if room < 12 or (facts and (not keys or rng.random() < filler) and not again):
                self._add_filler(rng, document, room)
            elif again:
                key, value, _ = facts[int(rng.integers(0, len(facts)))]
                document.add([self._phrases.keys[key], self._phrases.colon])
                document.add([self._phrases.values[value]], 1.0)
                document.add([self._phrases.newline])
            else:
                key = keys.pop()
                value = int(rng.integers(0, len(NOUNS)))
                facts.append((key, value, len(document.ids) + 2))
                document.add([self._phrases.keys[key], self._phrases.colon], TEXT_WEIGHT)
                document.add([self._phrases.values[value]], 0.0)
                document.add([self._phrases.newline])
        return facts

    def _add_filler(self, rng: np.random.Generator, document: Document, room: int) -> None:
        """Add one plain sentence, or exactly ``room`` tokens of words if no sentence fits."""
        sentence = [
            *self._phrases.the,
            *_pick(rng, self._phrases.adjectives),
            _pick(rng, self._phrases.values),
            *_pick(rng, self._phrases.verbs),
            *_pick(rng, self._phrases.places),
            *self._phrases.lower_the,
            _pick(rng, self._phrases.values),
            *self._phrases.stop,
            self._phrases.newline,
        ]
        if len(sentence) > room:
            sentence = [_pick(rng, self._phrases.values) for _ in range(room - 1)] + [self._phrases.newline]
        document.add(sentence)

    def _add_skills(self, rng: np.random.Generator, document: Document, length: int) -> None:
        """Add turns of small talk, repetition and small sums."""
        document.add(self._phrases.bos)
        while len(document.ids) < length:
            ask, say = self._turn(rng)
            document.add(self._phrases.user + ask + self._phrases.to_answer)
            document.add([*say, self._phrases.end[0]], 1.0)
            document.add([self._phrases.end[1]])

    def _turn(self, rng: np.random.Generator) -> tuple[list[int], list[int]]:
        kind = rng.random()
        if kind < 0.4:
            return self._phrases.small_talk[int(rng.integers(0, len(self._phrases.small_talk)))]
        if kind < 0.7:
            words = rng.integers(0, len(NOUNS), size=int(rng.integers(2, 9))).tolist()
            spaced = [self._phrases.values[word] for word in words]
            return self._phrases.repeat + spaced, [self._phrases.keys[words[0]], *spaced[1:]]
        left, right = (int(n) for n in rng.integers(0, 10, size=2))
        total = f"{left} + {right} = {left + right}"
        return self._phrases.encode(f"What is {left} + {right}?"), self._phrases.encode(total)

    def _question(self, key: int) -> list[int]:
        return [*self._phrases.what_is, self._phrases.keys[key], *self._phrases.question_mark]


def _pick(rng: np.random.Generator, choices: list[_Choice]) -> _Choice:
    return choices[int(rng.integers(0, len(choices)))]
