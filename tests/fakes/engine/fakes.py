"""A public fake of the computing half: no tensors, but KV in which every misuse is detected.

``FakeRunner`` stores in each slot of the pool a number that depends on all tokens up to that position, as real KV does.
Before each fake forward pass it checks that all slots that count as computed hold the right numbers. A block that is
allocated twice, read too early or written late therefore fails the test at once. Tokens depend on the known tokens
alone: ``fake_answer`` is the answer of every engine, with any batching, caching and preemption.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.errors import SettingError
from contract.layout import KVLayout
from contract.sampling import SamplingParams, choice_seed
from engine.connector import RankConnector, RanksConnector
from engine.kv_cache.startup import KVCacheConfig
from engine.kv_tiers.storage import TierStorage
from engine.models.config import ModelInfo
from engine.outputs import LogprobsLists, ModelRunnerOutput, OtherChoices, SchedulerOutput
from engine.settings import EngineSettings
from tests.fakes.engine.memory import MODULUS, FakeMemory, prefix_codes
from tests.fakes.engine.sequences import FakeSequence, FakeStates
from tests.fakes.engine.tiers import FakeTierStorage, open_fake_tiers

FAKE_VOCAB_SIZE = 1000
FAKE_MAX_MODEL_LEN = 256
FAKE_EOS = 999
NAN_TOKEN = 998
"""In a prompt: the logits are NaN when the first token is sampled."""
CRASH_TOKEN = 997
"""In a prompt: the forward pass raises."""


def fake_token(code: int, bitmask: NDArray[np.int32] | None = None) -> int:
    """Return the token that follows this code: never a special one; with a bitmask, one that it allows."""
    drawn = code * 48_271 % MODULUS
    if bitmask is None:
        return drawn % CRASH_TOKEN
    allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
    return int(allowed[drawn % len(allowed)])


def fake_first_token(code: int, seed: int, choice: int = 0, bitmask: NDArray[np.int32] | None = None) -> int:
    """Return the first token of a choice for a prompt with this code. Only this token depends on the seed."""
    return fake_token(code + choice_seed(seed, choice), bitmask)


def fake_answer(prompt_token_ids: Sequence[int], num_tokens: int, choice: int = 0) -> list[int]:
    """Return the first ``num_tokens`` tokens of every fake engine's answer to this prompt with seed 0."""
    known = list(prompt_token_ids)
    for index in range(num_tokens):
        code = prefix_codes(known)[-1]
        known.append(fake_token(code) if index else fake_first_token(code, 0, choice))
    return known[len(prompt_token_ids) :]


def fake_embedding(token_ids: Sequence[int], kind: str | None = "last") -> list[float]:
    """Return the embedding of every fake engine: two numbers; a mean and a maximum depend on all positions' codes."""
    return _pooled(prefix_codes(token_ids), kind)


def _pooled(codes: list[int], kind: str | None) -> list[float]:
    kept = {"last": codes[-1:], "mean": codes, "max": [max(codes)]}[kind or ""]
    return [float(sum(kept) % 65_521), float(len(codes))]


class FakeRunner:
    """Executes a SchedulerOutput as the real runner does, and asserts that it is consistent.

    num_mixed_steps: steps that computed prompts and continued answers. groups: the memory and the window of
    each group of layers, the first of which is ``memory``; empty: one group. states: of all slots (``FakeMemory``).
    """

    def __init__(
        self,
        memory: FakeMemory,
        groups: Sequence[tuple[FakeMemory, int | None]] = (),
        states: FakeStates | None = None,
    ) -> None:
        self.memory = memory
        self._groups = groups or [(memory, None)]
        self.connector: RankConnector | None = None
        self.num_forward_passes = 0
        self.num_dummy_batches = 0
        self.is_interrupted = False
        self.batch_sizes: list[int] = []
        self.num_mixed_steps = 0
        self._sequences: dict[str, FakeSequence] = {}
        self._states = memory.states = states

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step: forward pass, then the connector's orders, then its completions."""
        assert scheduled.total_num_scheduled_tokens == sum(scheduled.num_scheduled_tokens.values())
        for key in scheduled.finished_req_ids:
            del self._sequences[key]
        self._copy(scheduled.block_copies)
        starts = self._update(scheduled)
        kinds = {self._is_decode(key, start) for key, start in starts.items()}
        self.num_mixed_steps += {True, False} <= kinds
        assert starts.keys() == scheduled.num_scheduled_tokens.keys()
        is_cheap = scheduled.is_decode_only and scheduled.kv_connector_metadata is None
        may_be_interrupted = is_cheap and self._states is None
        output = ModelRunnerOutput(was_interrupted=self.is_interrupted and may_be_interrupted)
        output.num_nans_in_logits = {}
        computed = {} if output.was_interrupted else scheduled.num_scheduled_tokens
        for row, (key, num_tokens) in enumerate(computed.items()):
            output.req_ids.append(key)
            output.req_id_to_index[key] = row
            drafts = scheduled.scheduled_spec_decode_tokens.get(key, [])
            output.pooler_output.append(None)
            bitmask = scheduled.bitmask_of(key)
            sampled = self._compute(key, starts[key], num_tokens - len(drafts), output, bitmask)
            output.sampled_token_ids.append(sampled)
            if sampled:
                sampled += self._verify(key, starts[key] + 1, sampled[0], drafts, scheduled)
            if scheduled.num_draft_tokens:
                output.spec_token_ids.append(self._propose(key, scheduled.num_draft_tokens.get(key, 0)))
        for key in scheduled.num_compared_tokens.keys() & computed.keys():
            # See ``_propose``: it was right up to a place that depends on the tokens before those that are compared.
            num_tokens = scheduled.num_compared_tokens[key]
            num_right = (len(self._sequences[key].token_ids) - num_tokens) % 5
            if num_right < 4 and output.sampled_token_ids[output.req_id_to_index[key]]:
                output.num_right_drafts[key] = min(num_right, num_tokens)
        self.num_forward_passes += bool(computed)
        self.batch_sizes.append(scheduled.total_num_scheduled_tokens)
        output.logprobs = self._logprobs(output)
        if self.connector:
            if scheduled.kv_connector_metadata is not None:
                self.connector.execute(scheduled.kv_connector_metadata)
            output.finished_sending, output.finished_recving = self.connector.get_finished()
        return output

    def execute_dummy_batch(self) -> None:
        """Make a forward pass for other ranks only."""
        self.num_dummy_batches += 1

    def _copy(self, copies: Sequence[list[tuple[int, int]]]) -> None:
        for (memory, _), pairs in zip(self._groups, copies, strict=False):
            memory.copy_blocks(pairs)
        if self._states is not None:
            self._states.begin(copies[-1] if copies else ())

    def _is_decode(self, key: str, start: int) -> bool | None:
        """Return whether a step continues an answer; None if it may also be the end of a prompt, or of a replayed answer."""
        sequence = self._sequences[key]
        if start < len(sequence.token_ids) - 1 or start < sequence.num_prompt_tokens:
            return False
        return sequence.has_sampled or None

    def _update(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Record new and continued requests; return where each one's computation starts."""
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            assert new.req_id not in self._sequences
            assert (new.sampling_params is None) is (new.pooling_params is not None)
            tokens = list(new.prompt_token_ids)
            sampling = new.sampling_params or SamplingParams()
            self._sequences[new.req_id] = FakeSequence(
                tokens,
                prefix_codes(tokens),
                list(map(list, new.block_ids)),
                sampling,
                new.num_prompt_tokens,
                new.num_choices,
                new.pooling_params,
            )
            starts[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for index, key in enumerate(cached.req_ids):
            sequence = self._sequences[key]
            blocks = cached.new_block_ids[index]
            assert len(blocks) == len(self._groups) + (self._states is not None)
            if cached.resumed_from_preemption[index]:
                assert cached.new_token_ids[index] == sequence.token_ids
                sequence.tables = list(map(list, blocks))
                sequence.has_sampled = False
            else:
                for table, added in zip(sequence.tables, blocks, strict=True):
                    table.extend(added)
            starts[key] = cached.num_computed_tokens[index]
        return starts

    def _compute(
        self,
        key: str,
        start: int,
        num_tokens: int,
        output: ModelRunnerOutput,
        bitmask: NDArray[np.int32] | None,
    ) -> list[int]:
        sequence = self._sequences[key]
        end = start + num_tokens
        assert 0 < num_tokens <= len(sequence.token_ids) - start
        if self._states is not None:
            self._states.absorb(sequence.tables[-1], sequence.codes, start, end)
        for (memory, window), table in zip(self._groups, sequence.tables, strict=self._states is None):
            seen = 0 if window is None else max(0, start - window + 1)
            kept = table[seen // memory.layout.block_size :]
            assert len(set(kept)) == len(kept)
            assert 0 not in kept
            memory.check(table, sequence.codes, start, seen)
            memory.write(table, sequence.codes, start, end)
        if CRASH_TOKEN in sequence.token_ids:
            raise RuntimeError("the forward pass crashed")
        if sequence.pooling:
            self._pool(key, start, end, output)
            return []
        if end < len(sequence.token_ids):
            assert bitmask is None, f"{key} samples no token but has a grammar bitmask"
            return []
        assert (bitmask is None) is (sequence.sampling.grammar is None)
        if NAN_TOKEN in sequence.token_ids:
            assert output.num_nans_in_logits is not None
            output.num_nans_in_logits[key] = FAKE_VOCAB_SIZE
            sequence.append(0)  # a step that runs ahead continues with any token
            return []
        code = sequence.codes[-1]
        seed = sequence.sampling.seed
        is_first = end == sequence.num_prompt_tokens
        if sequence.num_choices > 1 and is_first:
            others = [
                fake_first_token(code, seed, choice, bitmask) for choice in range(1, sequence.num_choices)
            ]
            output.other_choices[key] = OtherChoices(others, self._logprobs_of(others, sequence))
        token = fake_first_token(code, seed, 0, bitmask) if is_first else fake_token(code, bitmask)
        sequence.append(token)
        return [token]

    def _verify(
        self, key: str, start: int, sampled: int, drafts: list[int], scheduled: SchedulerOutput
    ) -> list[int]:
        """Write the KV of all drafts, as a step does, and return the tokens behind the right ones."""
        sequence = self._sequences[key]
        if drafts and self._states is not None:
            self._states.note_drafts(sequence.tables[-1])
        codes = [*sequence.codes[:start], *prefix_codes([*sequence.token_ids[:start], *drafts])[start:]]
        for (memory, _), table in zip(self._groups, sequence.tables, strict=self._states is None):
            memory.write(table, codes, start, start + len(drafts))
        kept: list[int] = []
        for place, draft in enumerate(drafts, 1):
            if draft != (kept[-1] if kept else sampled):
                break
            if self._states is not None:
                self._states.absorb(sequence.tables[-1], sequence.codes, start + place - 1, start + place)
            token = fake_token(sequence.codes[-1], scheduled.bitmask_of(key, place))
            sequence.append(token)
            kept.append(token)
        return kept

    def _propose(self, key: str, num_drafts: int) -> list[int]:
        """Propose right tokens up to a place that depends on the request, and wrong ones behind it; sometimes none."""
        sequence = self._sequences[key]
        num_right = len(sequence.token_ids) % 5
        known = list(sequence.token_ids)
        for _ in range(num_drafts if num_right < 4 else 0):
            token = fake_token(prefix_codes(known)[-1])
            known.append(
                token if len(known) - len(sequence.token_ids) < num_right else (token + 1) % NAN_TOKEN
            )
        return known[len(sequence.token_ids) :]

    def _pool(self, key: str, start: int, end: int, output: ModelRunnerOutput) -> None:
        sequence = self._sequences[key]
        assert sequence.pooling
        kind = sequence.pooling.pooling_type
        if start == 0:
            sequence.pooled_codes = []
        sequence.pooled_codes += sequence.codes[start:end]
        assert kind == "last" or len(sequence.pooled_codes) == end, (
            f"{key}: tokens are missing from the {kind}"
        )
        if end < len(sequence.token_ids):
            return
        if NAN_TOKEN in sequence.token_ids:
            assert output.num_nans_in_logits is not None
            output.num_nans_in_logits[key] = 2
            return
        codes = sequence.codes[:end] if kind == "last" else sequence.pooled_codes
        output.pooler_output[-1] = _pooled(codes, kind)

    def _logprobs_of(self, tokens: list[int], sequence: FakeSequence) -> LogprobsLists | None:
        if (k := sequence.sampling.logprobs) is None:
            return None
        ids = [[token, *range(k)] for token in tokens]
        return LogprobsLists(ids, [[-float(t) for t in row] for row in ids], [token + 1 for token in tokens])

    def _logprobs(self, output: ModelRunnerOutput) -> LogprobsLists | None:
        """Return log probability -t for token t, with as many alternatives as the largest request's k."""
        num_logprobs = [self._sequences[key].sampling.logprobs for key in output.req_ids]
        if all(k is None for k in num_logprobs):
            return None
        best = list(range(max(k for k in num_logprobs if k is not None)))
        sampled = [token for tokens in output.sampled_token_ids for token in tokens or [0]]
        firsts = [0, *accumulate(len(tokens or [0]) for tokens in output.sampled_token_ids)]
        ids = [[token, *best] for token in sampled]
        values = [[-float(t) for t in row] for row in ids]
        return LogprobsLists(ids, values, [token + 1 for token in sampled], firsts[:-1])


class FakeExecutor:
    """One rank with a FakeRunner, loaded when the constructor returns (``engine.executor.Executor``).

    runs_ahead: steps may begin before the one before is waited for, as on a device; none of them is interrupted then.
    kv_cache_config: several groups of layers; None: one, of ``kv_cache_bytes`` blocks.
    """

    def __init__(self, settings: EngineSettings, config: KVCacheConfig | None = None) -> None:
        if not settings.model.name:
            raise SettingError(f"model is {str(settings.model)!r}; give the name of a fake", param="model")
        self.model_info = ModelInfo(
            vocab_size=FAKE_VOCAB_SIZE,
            max_model_len=settings.max_model_len or FAKE_MAX_MODEL_LEN,
            eos_token_ids=(FAKE_EOS,),
            fingerprint=f"fake:{settings.model.name}",
            dtype="float32",
            kv_dtype="float32",
            states=config.cache.states if config else None,
        )
        self.kv_cache_config = config
        numbers = config.num_blocks if config else (settings.kv_cache_bytes or 64,)
        windows = [group.window for group in config.cache.groups] if config else [None]
        memories = [FakeMemory(number, settings.block_size) for number in numbers]
        self.memory = memories[0]
        self.memory.others = memories[1:]
        groups = list(zip(memories, windows, strict=True))
        self.runner = FakeRunner(self.memory, groups, states=FakeStates.of(config) if config else None)
        self.tiers: list[FakeTierStorage] = []
        self.is_shut_down = False
        self.runs_ahead = False
        self.reload_errors: dict[str, Exception] = {}
        self.may_reload = threading.Event()
        self.may_reload.set()

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self.memory.layout

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the one rank. A reload waits for ``may_reload``, or raises one of ``reload_errors``."""
        if error := self.reload_errors.get(method):
            raise error
        if method in ("check_reload", "reload_weights"):
            if method == "reload_weights":
                assert self.may_reload.wait(60)
                self.model_info = replace(self.model_info, fingerprint=f"{self.model_info.fingerprint}+")
            return [None]
        return [getattr(self.runner, method)(*args)]

    def set_connector(self, connector: RanksConnector) -> None:
        """Start the rank's half of the connector with the memory."""
        rank = connector.in_process()
        rank.start(self.memory)
        self.runner.connector = rank

    def open_kv_tiers(self, settings: EngineSettings) -> list[TierStorage]:
        """Open a tier of ``host_kv_bytes`` blocks, if that is not 0, and one of ``disk_kv_bytes``, if there is a folder."""
        self.tiers += open_fake_tiers(self.memory, settings)
        return [*self.tiers]

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step."""
        return self.runner.execute_model(scheduled)

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Return a function that runs the step, as late as a device might: nothing is written before; see Executor."""
        self.runner.is_interrupted = False
        return partial(self.execute_model, scheduled)

    def interrupt(self) -> None:
        """Interrupt the step that has begun; see Executor."""
        self.runner.is_interrupted = not self.runs_ahead

    def watch(self, wake: Callable[[], None]) -> None:
        """Do nothing: ranks in this process end with it."""

    def shutdown(self) -> None:
        """Close the connector's half."""
        self.is_shut_down = True
        for tier in self.tiers:
            tier.close()
        if self.runner.connector:
            self.runner.connector.close()


def start_fake_executor(settings: EngineSettings) -> tuple[FakeExecutor, int]:
    """Start a fake for ``engine.startup.start_executor``. ``kv_cache_bytes`` counts blocks, default 64. Picklable."""
    executor = FakeExecutor(settings)
    return executor, executor.memory.num_blocks
