"""A router in front of workers that answer like a scripted agent's model: a call that reads a file, then a text."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.identity import Role
from protos import worker_pb2
from router.testing.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.text.tiny_model import END, byte_ids, model_files, tiny_tokenizer, write_model

LENGTH = 2**18
"""Tokens of one byte: room for the prompts of agents, which have 10,000 usual tokens."""
_SMALL = 8192
"""Characters of a prompt without tools at most, by which an agent asks for a title."""
SECRET = "the moose sleeps at noon"
DONE = "I have read the file."


@dataclass
class Conversation:
    """The prompts with tools that a worker has received, and its answers.

    call: the text of its call. marker: a word of the question.
    """

    call: str
    marker: str
    prompts: list[str] = field(default_factory=list)

    def answer(self, task: worker_pb2.Task) -> Script:
        """Answer a call until the prompt has the file's content, then a text."""
        prompt = str(tiny_tokenizer().decode(list(task.prompt_token_ids), skip_special_tokens=False))
        if self.marker not in prompt or len(prompt) < _SMALL:
            return Script(tokens=[*byte_ids(b"A title"), END])
        self.prompts.append(prompt)
        said = DONE if SECRET in prompt else self.call
        return Script(tokens=[*byte_ids(said.encode()), END])


@asynccontextmanager
async def agent_cluster(folder: Path, template: str, conversation: Conversation) -> AsyncIterator[Cluster]:
    """Run a router for a model with this template, whose worker answers as ``conversation`` does."""
    config = {"chat_template": template, "eos_token": "<|end|>", "bos_token": "<|bos|>"}
    files = model_files(max_position_embeddings=LENGTH) | {
        "tokenizer_config.json": json.dumps(config).encode(),
        "tokenizer.json": tiny_tokenizer().to_str().encode(),
    }
    model = write_model(folder / "tiny", files)
    options: dict[str, Any] = {"model": model, "tool_parser": "hermes", "reasoning_parser": "none"}
    async with running_cluster(conversation.answer, (), **options) as cluster:
        await cluster.add(Role.AGGREGATED, max_model_len=LENGTH, num_blocks=LENGTH)
        yield cluster


def share_of_prefix(earlier: str, later: str) -> float:
    """Return the share of an earlier prompt with which a later one begins."""
    same = next(
        (at for at, pair in enumerate(zip(earlier, later, strict=False)) if pair[0] != pair[1]), len(earlier)
    )
    return min(same, len(earlier)) / len(earlier)
