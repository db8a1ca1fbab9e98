"""Markup that consists of special tokens reaches the parser of each family, token by token, and no client."""

import pytest

from router.answers.answer import TokenTexts
from router.tokens.delivery import Token
from tests.text.parsing.cutting import parse
from tests.text.parsing.families import FORMATS, written
from tests.text.parsing.test_families import ALL, NOW, PARIS, TOOLS, values
from tests.text.tiny_model import tiny_tokenizer
from text.chat import Chat
from text.parsing.answer_format import TOOL_PARSERS, AnswerFormat
from text.tokenizer import Tokenizer

ENDS = ("<|call|>", "<|return|>")
"""Tokens that end an answer, which therefore have no text."""


@pytest.mark.parametrize(("name", "variant"), FORMATS)
def test_special_tokens_of_a_format_are_seen_and_not_shown(name: str, variant: str) -> None:
    parser = AnswerFormat(TOOL_PARSERS[name]).parser(Chat(messages=[], tools=TOOLS), "")
    backend = tiny_tokenizer()
    backend.add_special_tokens([*TOOL_PARSERS[name].tags, "<|other|>"])
    tokenizer = Tokenizer(backend, {})
    text = written(name, variant, [PARIS, ALL, NOW], "Look: 世界", "Done.<|other|>")
    hidden = [token_id for end in ENDS if (token_id := tokenizer.token_id(end)) is not None]
    texts = TokenTexts(tokenizer, [], hidden, parser.tags, skip_special_tokens=True)
    pieces = [texts.push(Token(0, token_id)) for token_id in tokenizer.encode(text)]
    found = parse(parser, *pieces, texts.flush())
    assert values(found) == [PARIS, ALL, NOW]
    assert "".join(found.content.split()) == "Look:世界Done."
