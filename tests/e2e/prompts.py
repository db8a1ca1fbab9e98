"""The golden prompts: 64 of 1 to 1,500 tokens, some with a common prefix, greedy and seeded sampling."""

import random

from protos import inference_pb2 as pb

MAX_PROMPT = 1500
VOCABULARY = range(300, 1400)


def golden_requests(seed: int = 2026) -> tuple[list[pb.GenerateRequest], list[pb.GenerateRequest]]:
    """Return 40 requests without common prefixes, and 24 in four families that share 1 to 40 blocks of prefix."""
    rng = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, MAX_PROMPT]
    lengths += [rng.randint(1, 400) for _ in range(26)] + [rng.randint(800, MAX_PROMPT) for _ in range(2)]
    alone = [_request(rng, _tokens(rng, length), i) for i, length in enumerate(lengths)]
    families = []
    for shared in (16, 96, 200, 640):
        prefix = _tokens(rng, shared)
        families += [prefix + _tokens(rng, rng.randint(1, 60)) for _ in range(6)]
    together = [_request(rng, tokens, i) for i, tokens in enumerate(families)]
    return alone, together


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(length)]


def _request(rng: random.Random, tokens: list[int], index: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=rng.randint(2, 24), ignore_eos=True)
    if index % 2:
        sampling.temperature, sampling.seed = rng.choice([0.5, 1.0, 1.5]), rng.getrandbits(40)
        sampling.top_k, sampling.top_p = rng.choice([0, 20]), rng.choice([0.9, 1.0])
    else:
        sampling.temperature = 0.0
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=tokens), sampling=sampling)
