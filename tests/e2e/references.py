"""The same requests answered without a service: by the offline engine, and by transformers."""

import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.client import EngineClient, InProcessClient
from engine.settings import EngineSettings
from protos import inference_pb2 as pb


async def offline_answers(model: Path, requests: list[pb.GenerateRequest]) -> list[list[int]]:
    """Return the answers of one engine in this process to all requests at once."""
    settings = EngineSettings(model=model, dtype="float32", kv_cache_bytes=64 * 2**20)
    client = await InProcessClient.start(settings)
    try:
        jobs = (_offline(client, request, index) for index, request in enumerate(requests))
        return await asyncio.gather(*jobs)
    finally:
        await client.shutdown()


async def _offline(client: EngineClient, request: pb.GenerateRequest, index: int) -> list[int]:
    sampling = request.sampling
    engine_request = EngineRequest(
        request_id=f"golden-{index}",
        prompt_token_ids=list(request.token_ids.ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            seed=sampling.seed,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
        ),
    )
    return [token async for output in client.generate(engine_request) for token in output.token_ids]


def transformers_answers(model: Path, requests: list[pb.GenerateRequest]) -> dict[int, list[int]]:
    """Return the answers to greedy requests, by their index, each computed alone by ``generate``."""
    torch.set_num_threads(1)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.generation_config.eos_token_id = None
    answers = {}
    for index, request in enumerate(requests):
        if request.sampling.temperature == 0:
            ids = torch.tensor([list(request.token_ids.ids)])
            output = reference.generate(  # type: ignore[misc]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request.sampling.max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
            answers[index] = output[0, ids.shape[1] :].tolist()
    return answers
