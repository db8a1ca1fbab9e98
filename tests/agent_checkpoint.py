"""Checkpoints that answer as an agent's model: a question by the call of a tool, a tool's result by a text.

The model is the one of ``engine.models.scripted``, which finds its answer in the prompt by attention over the KV cache. The
chat template is a form that models for agents are published with; before its generation prompt it writes the script of
the answer, which the role of the last message selects.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.models.scripted import write_scripted_model
from engine.models.scripted_config import ScriptTokens
from tests.text import agent_templates

LENGTH = 2**16
"""The model's length: agents' prompts have 10,000 to 30,000 tokens, more with a small vocabulary."""
DONE = "I have read the file."
_THOUGHT = "I use a tool."
_VOCABULARY = 4000
_END, _SCRIPT, _LOST = "<|end|>", "<|script|>", "<|lost|>"
_GENERATES = "{% if add_generation_prompt %}"
_DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Form:
    """One form of templates. marker: the last special token of its generation prompt. header: the text behind it.

    parser: the format of its calls. special: further special tokens.
    """

    marker: str
    header: str
    parser: str
    special: tuple[str, ...] = ()

    def script(self, text: str) -> str:
        """Return what follows the marker in an answer with this text."""
        thought = f"{_THOUGHT}\n</think>\n\n" if self.header.endswith("<think>\n") else "\n"
        return f"{self.header}{thought}{text}"

    def call(self, name: str, arguments: Mapping[str, str]) -> str:
        """Return a call in the format of the form's parser."""
        if self.parser == "qwen":
            lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
            return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FORMS = {
    "QWEN35": Form("<|im_start|>", "assistant\n<think>\n", "qwen", ("<|im_end|>",)),
    "GPT_OSS": Form("<|start|>", "assistant", "hermes", ("<|message|>", "<|channel|>", "<|call|>")),
    "MINIMAX": Form("]~b]", "ai\n<think>\n", "hermes", ("]~!b[", "[e~[")),
}


def make_agent_checkpoint(folder: Path, form: str, call: str, arguments: Mapping[str, str]) -> Path:
    """Write the model, which calls this function first; return ``folder``."""
    chosen = FORMS[form]
    backend = _tokenizer(chosen)
    names = backend.get_vocab()
    tokens = ScriptTokens(begin=names[_SCRIPT], answer=names[chosen.marker], lost=names[_LOST])
    size = backend.get_vocab_size()
    write_scripted_model(folder, tokens, vocab_size=size, eos_token_id=names[_END], max_model_len=LENGTH)
    backend.save(str(folder / "tokenizer.json"))
    named = {"eos_token": _END, "chat_template": _template(form, chosen.call(call, arguments))}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def _template(form: str, call: str) -> str:
    """Return the form's template with the scripts; a request without tools asks for a title."""
    write = [f"{{{{ {json.dumps(FORMS[form].script(text))} }}}}" for text in ("A title", DONE, call)]
    scripts = (
        f"{{{{ '{_SCRIPT}' }}}}{{% if not tools %}}{write[0]}{{% elif messages[-1].role == 'tool' %}}{write[1]}"
        f"{{% else %}}{write[2]}{{% endif %}}{{{{ '{_END}' }}}}"
    )
    before, generation_prompt = agent_templates.ALL[form].rsplit(_GENERATES, 1)
    return f"{before}{_GENERATES}{scripts}{generation_prompt}"


@cache
def _merges() -> str:
    """Return a byte-level tokenizer, trained on the documentation, as JSON."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    backend.train([str(path) for path in sorted(_DOCS.glob("*.md"))], trainer)
    return str(backend.to_str())


def _tokenizer(form: Form) -> Tokenizer:
    backend = Tokenizer.from_str(_merges())
    special = (_END, _SCRIPT, form.marker, *form.special)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    plain = ("<think>", "</think>", "<tool_call>", "</tool_call>", _LOST)
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in plain])
    return backend
