"""Chat messages → prompt text → token ids."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from contract.errors import InvalidRequestError, SettingError
from tests.text.tiny_model import BOS, END, SPECIAL, byte_ids, model_files, tiny_tokenizer, write_model
from text.chat import Chat, parse_messages
from text.model_card import ModelCard
from text.templates.chat_template import ChatTemplate

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


def said(*texts: str, **options: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": text} for text in texts], **options)


def test_tools_and_documents_are_none_as_in_transformers() -> None:
    found = template("{{ messages[0].content }} {{ tools is none }} {{ documents is none }}").render(
        said("x")
    )
    assert found == "x True True"


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
    assert conversation[1]["content"] == [{"type": "text", "text": "Who won the world series in 2020?"}]
    assert card.chat_template is not None
    prompt = card.chat_template.prompt(Chat(messages=conversation))
    assert prompt.text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWho won the world series in 2020?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = card.encode_prompt(prompt)
    assert len(ids) == 31
    assert ids == WORLD_SERIES_IDS


@pytest.mark.parametrize("typed", ["hi", "hi <|end|>"])
def test_the_tokenizer_adds_no_special_token_to_a_chat(tmp_path: Path, typed: str) -> None:
    """A6: the template writes those that it needs; a second one in front would be another prompt."""
    backend = tiny_tokenizer()
    bos = SPECIAL[BOS]
    backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, BOS)])
    files = model_files() | {"tokenizer.json": backend.to_str().encode()}
    card = ModelCard.from_folder(write_model(tmp_path / "model", files))
    assert card.tokenizer.encode("hi")[0] == BOS
    assert card.chat_template is not None
    ids = card.encode_prompt(card.chat_template.prompt(said(typed)))
    user, assistant = (SPECIAL.index(name) for name in ("<|user|>", "<|assistant|>"))
    assert ids == [BOS, user, *byte_ids(typed.encode()), END, assistant]
    card.close()


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (None, "messages", "at least one message"),
        ([], "messages", "at least one message"),
        ("hi", "messages", "at least one message"),
        ([{"role": "user", "content": "a"}, "hi"], "messages[1]", "must be an object"),
        ([{"role": "wizard", "content": "a"}], "messages[0].role", "'wizard'"),
        ([{"content": "a"}], "messages[0].role", "None"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "tool"}], "messages[0].content", "missing"),
        ([{"role": "user", "content": 7}], "messages[0].content", "string or a list"),
        ([{"role": "user", "content": []}], "messages[0].content", "string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]", "with a string"),
        ([{"role": "tool", "content": "", "tool_call_id": 7}], "messages[0].tool_call_id", "string"),
        ([{"role": "user", "content": "", "name": []}], "messages[0].name", "string"),
        (
            [{"role": "assistant", "content": "", "reasoning_content": 7}],
            "messages[0].reasoning_content",
            "string",
        ),
        ([{"role": "assistant", "tool_calls": 7}], "messages[0].tool_calls", "list of calls"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]", "must be a call"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}],
            "messages[0].tool_calls[0].function.name",
            "''",
        ),
    ],
)
def test_a_bad_message_is_named_by_its_index(messages: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_messages(messages)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    "message",
    [
        {"content": None},
        {},
        {"content": None, "refusal": None, "function_call": None, "audio": None, "annotations": None},
        {"content": None, "reasoning_content": "Hm.", "reasoning": "Hm.", "tool_calls": None},
        {"content": "", "tool_calls": []},
    ],
)
def test_an_answer_of_nothing_or_of_reasoning_is_history(message: dict[str, Any]) -> None:
    """F10: clients without support for reasoning send back only ``content: null``."""
    (parsed,) = parse_messages([{"role": "assistant", **message}])
    assert not parsed.get("content") and "tool_calls" not in parsed


def test_a_refusal_is_the_content_where_there_is_no_other() -> None:
    """F10: a text of the conversation in another field is not lost."""
    (parsed,) = parse_messages([{"role": "assistant", "content": None, "refusal": "I cannot."}])
    assert parsed["content"] == "I cannot."


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_an_assistant_message_with_tool_calls_needs_no_content(content: Any) -> None:
    """F2: null, empty and missing contents stay distinct."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    sent = {"role": "assistant", **content, "tool_calls": calls}
    (message,) = parse_messages([sent])
    assert message == sent
    assert list(message) == list(sent)


def test_text_parts_are_joined_by_newlines_where_a_template_takes_no_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = parse_messages([{"role": "user", "content": parts}])
    assert messages[0]["content"] == parts
    assert template("{{ messages[0].content }}").render(Chat(messages=messages)) == "a\nb"


def test_template_sees_what_transformers_gives_it() -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ {'a': 'é<'} | tojson }}{{ strftime_now('%Y') }}\n"
        "{% for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n{{ m.content }}{% endfor %}\n"
        "{% generation %}g{% endgeneration %}"
    )
    year = datetime.now().astimezone().year
    out = template(source).render(said("x", "y"))
    assert out.split() == ['<s></s>{"a":', f'"é<"}}{year}', "xyg"]


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}\n"
    assert template(source).render(said("")) == "user\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content + 1 }}", "rejects these messages"),
        ("{{ messages.append(1) }}", "rejects these messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects these messages"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        template(source).render(said("x"))
    assert caught.value.param == "messages"


def test_developer_messages_are_system_messages_where_the_template_has_no_developer() -> None:
    message = Chat(messages=[{"role": "developer", "content": "x"}])
    generic = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    assert template(generic).render(message) == "system:x;"
    assert template(generic + "{# developer #}").render(message) == "system:x;"
    native = generic.replace("{{ m.role }}", "{{ 'DEV' if m.role == 'developer' else m.role }}")
    assert template(native).render(message) == "DEV:x;"


def test_a_broken_template_is_a_setting_error() -> None:
    with pytest.raises(SettingError, match="cannot be compiled"):
        template("{% if %}")


@pytest.mark.parametrize(
    "arguments", ['{"a": ', "[1]", "7", '{"a": "\\ud800"}', '["A"]', '{"a": NaN}', '{"a": 1,}']
)
def test_arguments_of_a_call_stay_the_clients_text(arguments: str) -> None:
    """F10: any arguments of a model are accepted in a conversation."""
    calls = [{"function": {"name": "f"}}, {"function": {"name": "a b", "arguments": arguments}}]
    (message,) = parse_messages([{"role": "assistant", "tool_calls": calls}])
    assert message["tool_calls"][1] == calls[1]


def test_arguments_that_are_neither_text_nor_an_object_are_named() -> None:
    calls = [{"function": {"name": "f"}}, {"function": {"name": "f", "arguments": 7}}]
    with pytest.raises(InvalidRequestError, match="JSON text") as caught:
        parse_messages([{"role": "assistant", "tool_calls": calls}])
    assert caught.value.param == "messages[0].tool_calls[1].function.arguments"


def test_a_template_gets_calls_with_arguments_that_it_can_go_through() -> None:
    source = (
        "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|{{ m.reasoning_content }}"
        "{% for c in m.tool_calls %}{{ c.id }} {{ c.function.name }}{% for k, v in c.function.arguments | items %}"
        " {{ k }}={{ v | tojson }}{% endfor %}{% endfor %};{% endfor %}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1], "b": "é"}'}}
    messages = parse_messages(
        [
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "assistant", "content": "3!", "tool_calls": []},
        ]
    )
    assert template(source).render(Chat(messages=messages)) == (
        'assistant|||Hm.c1 f a=[1] b="é";tool|3|c1|;assistant|3!||;'
    )
    assert "tool_calls" not in messages[2]


def test_a_template_gets_tools_documents_and_variables() -> None:
    source = (
        "{{ messages[0].content }} {{ tools | tojson }} {{ documents[0].text }} {{ enable_thinking }}"
        " {{ add_generation_prompt }}"
    )
    chat = said(
        "x",
        tools=({"type": "function", "function": {"name": "f"}},),
        documents=({"text": "d"},),
        template_kwargs={"enable_thinking": False},
    )
    tool = '{"type": "function", "function": {"name": "f"}}'
    assert template(source).render(chat) == f"x [{tool}] d False True"


def test_tools_have_a_template_of_their_own_where_the_model_has_one() -> None:
    found = ChatTemplate(
        "plain {{ messages[0].content }}",
        bos_token=None,
        eos_token=None,
        tool_source="{{ tools[0].function.name }} {{ messages[0].content }}",
    )
    tools = ({"type": "function", "function": {"name": "f"}},)
    assert [found.render(said("x")), found.render(said("x", tools=tools))] == ["plain x", "f x"]
    assert found.source.startswith("plain ")


@pytest.mark.parametrize(
    ("content", "written", "end"),
    [
        ("Once upon", "{{ m.content }}", "Once upon"),
        ("Once ", "{{ m.content }}", "Once "),
        ("Once ", "{{ m.content | trim }}", "Once"),
        ("\n Once ", "{{ m.content | trim }}", "Once"),
        ("x", "x {{ m.content }}", "x x"),
    ],
)
def test_the_final_message_is_continued_where_its_content_ends(content: str, written: str, end: str) -> None:
    source = (
        "{% for m in messages %}<" + written + "></s>{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    chat = said("hi", content, add_generation_prompt=False, continue_final_message=True)
    first = template(source.replace("{% endfor %}", "{% break %}{% endfor %}")).render(
        said("hi", add_generation_prompt=False)
    )
    assert template(source).render(chat) == f"{first}<{end}"


def test_a_final_message_that_the_template_writes_otherwise_cannot_be_continued() -> None:
    chat = said("abc", add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show") as caught:
        template("{{ messages[0].content | upper }}").render(chat)
    assert caught.value.param == "messages[0].content"


def test_arguments_that_are_nested_too_deep_for_an_object_are_shown_as_text() -> None:
    deep = "[" * 5_000 + "]" * 5_000
    call = {"function": {"name": "f", "arguments": f'{{"a": {deep}}}'}}
    messages = parse_messages([{"role": "assistant", "tool_calls": [call]}])
    assert deep in template("{{ messages | tojson }}").render(Chat(messages=messages))
