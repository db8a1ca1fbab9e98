"""An answer in channels (harmony) through the API: reasoning, text and calls, whole and streamed, on each API."""

from pathlib import Path

from tests.router.tool_cluster import ASK, CHAT, TEMPLATE, first_special, joined, writing_cluster
from tests.text.tiny_model import byte_ids, tiny_tokenizer
from text.parsing.harmony import HarmonyParser

HARMONY = f"{TEMPLATE}{{# <|start|> <|channel|> <|message|> #}}"
WRITTEN = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris 🎉"}'
)
PARIS = '{"city": "Paris 🎉"}'


def tokens() -> list[int]:
    """The answer's tokens: one for each tag, and one for each byte of other text."""
    backend = tiny_tokenizer()
    backend.add_special_tokens(list(HarmonyParser.tags))
    assert backend.token_to_id(HarmonyParser.tags[0]) == first_special()
    return list(backend.encode(WRITTEN).ids)


async def test_channels_are_the_parts_of_an_answer_on_each_api(tmp_path: Path) -> None:
    async with writing_cluster(tmp_path, tokens(), special=HarmonyParser.tags, template=HARMONY) as cluster:
        _, whole = await cluster.post(CHAT, ASK)
        streamed = joined(await cluster.stream(CHAT, ASK))
        _, blocks = await cluster.post(
            "/v1/messages",
            {
                "messages": ASK["messages"],
                "max_tokens": 400,
                "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}],
            },
        )
        _, plain = await cluster.post(CHAT, {**ASK, "tools": []})
    (choice,) = whole["choices"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": PARIS}
    ]
    assert choice["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] >= len(byte_ids(b"Hm."))
    assert (streamed["reasoning_content"], streamed["content"]) == ("Hm.", "I look.")
    assert [call["function"] for call in streamed["calls"]] == [{"name": "get_weather", "arguments": PARIS}]
    assert [block["type"] for block in blocks["content"]] == ["thinking", "text", "tool_use"]
    assert blocks["content"][-1]["input"] == {"city": "Paris 🎉"}
    assert plain["choices"][0]["message"]["content"] == f"I look.\n{PARIS}"
