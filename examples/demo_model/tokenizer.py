"""Trains the demo model's byte-level BPE tokenizer: every noun is one token, every other text is reachable by bytes."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.demo_model.words import ADJECTIVES, NOUNS, PLACES, SMALL_TALK, VERBS

SPECIAL_TOKENS = ["<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY_SIZE = 2048
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer() -> Tokenizer:
    """Train the tokenizer on the word lists; every call returns the same."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    return tokenizer


def _training_text() -> list[str]:
    words = [*NOUNS, *ADJECTIVES, *VERBS, *PLACES]
    lines = [f"{word} {word}\n" for word in words] * 20
    lines += ['What is "a"?', "Repeat: a", "The old fox sat near the lake.", "1 + 2 = 3"] * 50
    lines += [f"{ask}\n{say}\n" for ask, say in SMALL_TALK] * 20
    return lines
