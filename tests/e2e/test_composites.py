"""A model that takes images, too: its text is answered, and each API refuses an image by its place in the request."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from contract.identity import Role
from tests.checkpoints import reference_greedy, write_checkpoint
from tests.e2e.in_process import running_in_process
from tests.families.tiny_models import make_tiny

pytestmark = pytest.mark.e2e
TEXT: dict[str, Any] = {"type": "text", "text": "What is this?"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AA"}
# (path, parts of a user's message that are not text)
ASKED: list[tuple[str, list[dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}},
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA"}},
            {"type": "file", "file": {"file_id": "a"}},
        ],
    ),
    (
        "/v1/responses",
        [
            {"type": "input_image", "image_url": "data:image/png;base64,AA"},
            {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}},
            {"type": "input_file", "file_id": "a"},
        ],
    ),
    ("/v1/messages", [{"type": "image", "source": SOURCE}, {"type": "document", "source": SOURCE}]),
]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
async def test_an_image_is_refused_and_the_text_is_answered(tmp_path: Path, family: str) -> None:
    """One text has attention alone, the other one recurrent layers, too."""
    torch.set_num_threads(1)
    whole = make_tiny(family)
    model = write_checkpoint(tmp_path / "model", whole, 3)
    prompt = [3, 1, 4, 1, 5]
    expected = reference_greedy(whole, prompt, 8)
    async with (
        running_in_process(tmp_path, model, [Role.AGGREGATED], "tcp") as service,
        aiohttp.ClientSession(f"http://{service.http}") as session,
    ):

        async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
            async with session.post(path, json={"model": "model", "max_tokens": 8, **body}) as response:
                return response.status, await response.json()

        for path, parts in ASKED:
            name = "input" if path == "/v1/responses" else "messages"
            text = {**TEXT, "type": "input_text"} if name == "input" else TEXT
            limit = {"max_tokens": None, "max_output_tokens": 8} if name == "input" else {}
            for part in parts:
                said = [{"role": "user", "content": [text, part]}]
                status, answer = await post(path, {name: said, **limit})
                assert status == 400, answer
                told = answer["error"]["message"]
                assert f"{name}[0].content[1] is of type {part['type']!r}" in told
                assert "the model is given text only" in told
            status, answer = await post(path, {name: [{"role": "user", "content": [text]}], **limit})
            assert status == 200, answer
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = await post("/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected
        async with session.get("/v1/models") as response:
            (listed,) = (await response.json())["data"]
        assert listed["architecture"]["input_modalities"] == ["text"]
