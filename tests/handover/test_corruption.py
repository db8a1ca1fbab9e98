"""A damaged block of pulled KV never becomes an answer (law 3)."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from contract.errors import ErrorKind
from contract.outputs import FinishReason
from contract.sampling import SamplingParams
from examples.demo_model.data import DemoData
from tests.engine_pair import running_pair, tokens_of
from tests.kv_transfer.fakes import CorruptingReceiver

NUM_TOKENS, NUM_BLOCKS = 72, 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
async def test_no_answer_from_a_damaged_block(demo_model: Path, block: int) -> None:
    """Whichever block is overwritten, in both reads: one clear error, no token of the decode leg, all freed."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    prompt = DemoData(tokenizer).recall_prompt(np.random.default_rng(block), NUM_TOKENS)
    damage = partial(CorruptingReceiver, block_index=block)
    async with running_pair(demo_model, damage) as pair:
        first, rest = await pair.ask("damaged", prompt.token_ids, GREEDY)
        assert len(tokens_of(first)) == 1
        assert tokens_of(rest) == []
        assert rest[-1].finish_reason is FinishReason.ERROR
        assert rest[-1].error_kind == ErrorKind.TRANSFER_FAILED
        assert f"block {block}" in (rest[-1].error_message or "")
        counters = await pair.decode.call("counters")
        assert counters["transfer_digest_mismatches_total"] == 2
        await pair.until_free()
