"""Chat messages → prompt text → token ids."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from contract.errors import InvalidRequestError, SettingError
from tests.text.tiny_model import model_files, write_model
from text.chat import ChatTemplate, parse_messages
from text.model_card import ModelCard

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORLD_SERIES_PIECES = {
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "system": 8948,
    "user": 872,
    "assistant": 77091,
    "Ċ": 198,
    "You": 2610,
    "Ġare": 525,
    "Ġa": 264,
    "Ġhelpful": 10950,
    "Ġassistant": 17847,
    ".": 13,
    "Who": 15191,
    "Ġwon": 2765,
    "Ġthe": 279,
    "Ġworld": 1879,
    "Ġseries": 4013,
    "Ġin": 304,
    "Ġ": 220,
    "2": 17,
    "0": 15,
    "?": 30,
}
WORLD_SERIES_IDS = [
    *(151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198),
    *(151644, 872, 198, 15191, 2765, 279, 1879, 4013, 304, 220, 17, 15, 17, 15, 30, 151645, 198),
    *(151644, 77091, 198),
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def test_tools_and_documents_are_none_as_in_transformers() -> None:
    found = template("{{ tools is none }} {{ documents is none }}").render([{"role": "user", "content": "x"}])
    assert found == "True True"


def test_world_series_example_gives_the_listed_ids(tmp_path: Path) -> None:
    """A6: conversation → templated text → the 31 ids of the worked example."""
    special = {"<|im_start|>", "<|im_end|>"}
    backend = Tokenizer(
        models.BPE(
            vocab={k: v for k, v in WORLD_SERIES_PIECES.items() if k not in special},
            merges=[],
            ignore_merges=True,
        )
    )
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    described = json.loads(backend.to_str())
    described["added_tokens"] = [
        {
            "id": WORLD_SERIES_PIECES[name],
            "content": name,
            "special": True,
            "normalized": False,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
        }
        for name in sorted(special, key=lambda name: WORLD_SERIES_PIECES[name])
    ]
    described["model"]["vocab"] |= {name: WORLD_SERIES_PIECES[name] for name in special}
    files = model_files(vocab_size=151936) | {
        "tokenizer.json": json.dumps(described).encode(),
        "tokenizer_config.json": json.dumps(
            {"eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": CHATML}
        ).encode(),
    }
    card = ModelCard.from_folder(write_model(tmp_path / "model", files))
    conversation = parse_messages(
        [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [{"type": "text", "text": "Who won the world series in 2020?"}]},
        ]
    )
    assert conversation[1] == {"role": "user", "content": "Who won the world series in 2020?"}
    assert card.chat_template is not None
    text = card.chat_template.render(conversation)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWho won the world series in 2020?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = card.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 31
    assert ids == WORLD_SERIES_IDS


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (None, "messages", "at least one message"),
        ([], "messages", "at least one message"),
        ("hi", "messages", "at least one message"),
        ([{"role": "user", "content": "a"}, "hi"], "messages[1]", "no object"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role", "'wizard'"),
        ([{"content": "a"}], "messages[0].role", "None"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "missing"),
        ([{"role": "user", "content": 7}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": []}], "messages[0].content", "string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "with a string"),
    ],
)
def test_a_bad_message_is_named_by_its_index(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert words in caught.value.message


def test_an_assistant_message_with_tool_calls_needs_no_content() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert parse_messages([{"role": "assistant", "content": None, "tool_calls": calls}]) == [
        {"role": "assistant", "content": "", "tool_calls": calls}
    ]


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages([{"role": "user", "content": parts}])[0]["content"] == "a\nb"


def test_template_sees_what_transformers_gives_it() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ {'a': 'é<'} | tojson }}{{ strftime_now('%Y') }}\n"
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}{% endfor %}\n"
        "{% generation %}g{% endgeneration %}"
    )
    year = datetime.now().astimezone().year
    out = template(source).render([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])
    assert out.split() == ['<s></s>{"a":', f'"é<"}}{year}', "xg"]


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n"
    assert template(source).render([{"role": "user", "content": ""}]) == "user\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        template(source).render([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_developer_messages_are_system_messages_where_the_template_has_no_developer() -> None:
    message = [{"role": "developer", "content": "x"}]
    assert template("{{ messages[0].role }}").render(message) == "system"
    assert template("{{ messages[0].role }}{# developer #}").render(message) == "developer"


def test_a_broken_template_is_a_setting_error() -> None:
    with pytest.raises(SettingError, match="cannot be compiled"):
        template("{% if %}")
