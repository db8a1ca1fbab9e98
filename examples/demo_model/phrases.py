"""The token ids of the words and phrases of the demo model's data."""

from functools import cached_property

from tokenizers import Tokenizer

from examples.demo_model.words import ADJECTIVES, NOUNS, PLACES, SMALL_TALK, VERBS


class Phrases:
    """Encodes the fixed texts of the data with one tokenizer. Nouns and punctuation are single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.keys = [self._single(noun) for noun in NOUNS]
        self.values = [self._single(" " + noun) for noun in NOUNS]
        self.colon = self._single(":")
        self.newline = self._single("\n")
        self.small_talk = [(self.encode(ask), self.encode(say)) for ask, say in SMALL_TALK]
        self.adjectives = [self.encode(" " + word) for word in ADJECTIVES]
        self.verbs = [self.encode(" " + word) for word in VERBS]
        self.places = [self.encode(" " + word) for word in PLACES]

    @cached_property
    def bos(self) -> list[int]:
        """The begin of a chat."""
        return self.encode("<|bos|>")

    @cached_property
    def user(self) -> list[int]:
        """The header of a user's turn."""
        return self.encode("<|user|>\n")

    @cached_property
    def to_answer(self) -> list[int]:
        """The end of a user's turn, and the header of the answer."""
        return self.encode("<|end|>\n<|assistant|>\n")

    @cached_property
    def end(self) -> list[int]:
        """The end of a turn."""
        return self.encode("<|end|>\n")

    @cached_property
    def what_is(self) -> list[int]:
        """The beginning of a question."""
        return self.encode('What is "')

    @cached_property
    def question_mark(self) -> list[int]:
        """The end of a question."""
        return self.encode('"?')

    @cached_property
    def repeat(self) -> list[int]:
        """The request to repeat words."""
        return self.encode("Repeat:")

    @cached_property
    def the(self) -> list[int]:
        """The beginning of a filler sentence."""
        return self.encode("The")

    @cached_property
    def lower_the(self) -> list[int]:
        """The article within a filler sentence."""
        return self.encode(" the")

    @cached_property
    def stop(self) -> list[int]:
        """The end of a filler sentence."""
        return self.encode(".")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without added tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _single(self, text: str) -> int:
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} should be one token of the demo tokenizer, but is {ids}")
        return ids[0]
