"""B16: a service of real engines reads other weights while it answers; every answer is that of one checkpoint."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from contract.identity import Role
from contract.layout import model_fingerprint
from kv_transfer.options import TransportName
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy, replace_weights
from tests.e2e.in_process import LocalService, running_in_process
from tests.service import generate, generate_all

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

PROMPT = [(7 * i + 3) % 256 for i in range(40)]
NUM_TOKENS = 150
SAMPLING = pb.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=SAMPLING)
OTHER = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT[::-1]), sampling=SAMPLING)


def golden(folder: Path, request: pb.GenerateRequest = REQUEST) -> list[int]:
    return reference_greedy(load_reference(folder), list(request.token_ids.ids), NUM_TOKENS)


async def ask(service: LocalService) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of its prompt were cached."""
    (answer,) = await generate_all(service.router.addresses.grpc, [REQUEST], 1)
    assert answer.usage is not None
    return answer.token_ids, answer.usage.cached_tokens


async def reload(service: LocalService) -> tuple[int, dict[str, Any]]:
    url = f"http://{service.router.addresses.admin}/admin/reload_weights"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_answers_are_those_of_the_weights_that_began_them(
    tmp_path: Path, transport: TransportName
) -> None:
    """Running ones end, others wait meanwhile, and no later one finds anything of the former weights."""
    folder = make_checkpoint(tmp_path / "model", seed=1)
    old, other_old = golden(folder), golden(folder, OTHER)
    roles = [Role.PREFILL, Role.DECODE]
    async with running_in_process(tmp_path, folder, roles, transport) as service:
        assert await ask(service) == (old, 0)
        assert await ask(service) == (old, 32)

        replace_weights(folder, 2)
        new = golden(folder)
        assert new != old
        async with grpc.aio.insecure_channel(service.router.addresses.grpc) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            begun = stub.Generate(REQUEST)
            tokens = [token for choice in (await begun.read()).choices for token in choice.token_ids]
            answer = asyncio.create_task(reload(service))
            others = [asyncio.create_task(generate(stub, OTHER)) for _ in range(4)]
            while (message := await begun.read()) is not grpc.aio.EOF:
                tokens += [token for choice in message.choices for token in choice.token_ids]
            assert tokens == old
            fingerprint = model_fingerprint(folder, "float32")
            names = ["prefill-0", "decode-1"]
            assert await answer == (200, {"workers": names, "model_fingerprint": fingerprint})
            either = (other_old, golden(folder, OTHER))
            assert all([(await other).token_ids in either for other in others])

        assert await ask(service) == (new, 0)
        assert await ask(service) == (new, 32)

        replace_weights(folder, 3, num_hidden_layers=3)
        status, refused = await reload(service)
        assert status == 409 and "num_hidden_layers of config.json was 2" in refused["error"]["message"]
        assert (await ask(service))[0] == new
