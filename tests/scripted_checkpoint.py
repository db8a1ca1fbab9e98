"""Checkpoints of the scripted model with the chat templates and special tokens of the model families with tools.

The answer to a conversation is its last user message, one token for each byte except in tags.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from engine.models.scripted import write_scripted_model
from engine.models.scripted_config import ScriptTokens
from tests.text.tiny_model import END, tiny_tokenizer

LENGTH = 2048
LOST = "<|lost|>"
FORMATS = {
    "hermes": '<tool_call>{"name": …, "arguments": …}</tool_call>',
    "qwen": "<tool_call><function=…><parameter=…>…</parameter></function></tool_call>",
    "llama3": '<|python_tag|>{"name": …, "parameters": …}',
    "mistral": '[TOOL_CALLS][{"name": …, "arguments": …}]',
}
"""The part of each family's template about calls, by which the router selects the parser."""
_SPECIAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>", LOST)
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>Call{% for t in tools %} {{ t.function.name }}{% endfor %} as FORMAT,"
    " and think between <think> and </think>.<|end|>{% endif %}"
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def scripted_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, a few words, and the families' tags, special where they are."""
    backend = tiny_tokenizer()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in _PLAIN])
    return backend


def script_tokens(backend: Tokenizer) -> ScriptTokens:
    """Return the script's tokens: the user's message is the script; the answer follows the assistant's header."""
    names = backend.get_vocab()
    begin, answer, lost = (names[name] for name in ("<|user|>", "<|assistant|>", LOST))
    return ScriptTokens(begin=begin, answer=answer, lost=lost)


def make_scripted_checkpoint(folder: Path, family: str = "hermes") -> Path:
    """Write the model with its tokenizer and the chat template of one of FORMATS; return ``folder``."""
    backend = scripted_tokenizer()
    write_scripted_model(
        folder,
        script_tokens(backend),
        vocab_size=backend.get_vocab_size(),
        eos_token_id=END,
        max_model_len=LENGTH,
    )
    backend.save(str(folder / "tokenizer.json"))
    template = _TEMPLATE.replace("FORMAT", FORMATS[family])
    named = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder
