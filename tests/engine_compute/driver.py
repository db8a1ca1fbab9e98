"""Drives a rank with hand-made SchedulerOutputs, so that a test decides who computes how many tokens."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contract.requests import PoolingParams
from contract.sampling import SamplingParams
from contract.state_layout import StateLayout
from engine.executor import InProcessExecutor
from engine.kv_cache.shares import StateNeeds, Workload
from engine.kv_cache.startup import initialize_kv_cache
from engine.outputs import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.settings import EngineSettings


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 1000, **fields})


@dataclass
class Sequence:
    """The test's record of a request: its tokens, how many are computed, its blocks."""

    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    pooling: PoolingParams | None = None
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_known: bool = False

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class Driver:
    """A started engine rank, and a block allocator that never frees. states: of recurrent layers."""

    states: StateLayout | None = None

    def __init__(self, folder: Path, **settings: Any) -> None:
        defaults: dict[str, Any] = {"block_size": 4, "kv_cache_bytes": 1 << 21, "max_num_seqs": 16}
        made = EngineSettings(model=folder, **{**defaults, **settings})
        self.start(made, InProcessExecutor(made))

    def start(self, settings: EngineSettings, executor: InProcessExecutor) -> None:
        """Start the KV cache of an executor."""
        self.settings = settings
        self.executor = executor
        self.states = executor.model_info.states
        self.num_blocks, _ = initialize_kv_cache(executor, **self._of_states())
        self.runner = executor.runner
        self.sequences: dict[str, Sequence] = {}
        self._next_block = 1
        self._slots: dict[str, int] = {}

    def _of_states(self) -> dict[str, Any]:
        """Return what the start of a KV cache needs for a model with recurrent layers."""
        if self.states is None:
            return {}
        settings = self.settings
        length = self.executor.model_info.max_model_len
        return {
            "workload": Workload(length, settings.max_num_batched_tokens, settings.max_num_seqs),
            "states": StateNeeds(self.states, settings.block_size, has_drafts=settings.speculate != "none"),
        }

    def add(
        self, name: str, tokens: list[int], sampling: SamplingParams | None = None, **fields: Any
    ) -> None:
        fields.setdefault("num_prompt_tokens", len(tokens))
        self.sequences[name] = Sequence(list(tokens), sampling=sampling or greedy(), **fields)

    def step(
        self,
        counts: dict[str, int],
        finished: set[str] | None = None,
        drafts: dict[str, list[int]] | None = None,
    ) -> ModelRunnerOutput:
        """Run one step in which each named request computes that many tokens, the last of which are its drafts."""
        scheduled = SchedulerOutput(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            finished_req_ids=finished or set(),
            scheduled_spec_decode_tokens=drafts or {},
        )
        for name, count in counts.items():
            self.schedule(scheduled, name, self.sequences[name], count)
        output = self.executor.execute_model(scheduled)
        for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self.sequences[name].tokens += sampled
        for name, own in (drafts or {}).items():  # wrong ones are not computed
            num_sampled = len(output.sampled_token_ids[output.req_id_to_index[name]])
            self.sequences[name].num_computed -= 1 + len(own) - num_sampled
        return output

    def schedule(self, scheduled: SchedulerOutput, name: str, sequence: Sequence, count: int) -> None:
        """Add one request's share of a step to ``scheduled``, with the blocks that it needs."""
        needed = -(-(sequence.num_computed + count) // self.settings.block_size) - len(sequence.blocks)
        fresh = list(range(self._next_block, self._next_block + needed))
        self._next_block += len(fresh)
        sequence.blocks += fresh
        slots = []
        if self.states is not None and name not in self._slots:
            self._slots[name] = len(self._slots) + 1
            slots = [self._slots[name]]
        if sequence.is_known:
            add_cached(scheduled.scheduled_cached_reqs, name, fresh, sequence.num_computed)
        else:
            scheduled.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=list(sequence.tokens),
                    sampling_params=None if sequence.pooling else sequence.sampling,
                    pooling_params=sequence.pooling,
                    block_ids=(list(sequence.blocks), *([slots] if self.states else [])),
                    num_computed_tokens=sequence.num_computed,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    eos_token_ids=sequence.eos_token_ids,
                )
            )
        sequence.is_known = True
        sequence.num_computed += count

    def generate(self, names: list[str], num_tokens: int, chunk: int = 10_000) -> dict[str, list[int]]:
        """Compute the prompts in chunks, then decode, all in one batch; return the first ``num_tokens`` tokens of each."""
        while unfinished := [name for name in names if len(self.sequences[name].answer) < num_tokens]:
            self.step(
                {
                    name: min(chunk, len(self.sequences[name].tokens) - self.sequences[name].num_computed)
                    for name in unfinished
                }
            )
        return {name: self.sequences[name].answer[:num_tokens] for name in names}


def add_cached(
    cached: CachedRequestData,
    name: str,
    blocks: list[int],
    num_computed: int,
    *,
    resumed_with: list[int] | None = None,
) -> None:
    """Append one request to the columns; ``resumed_with``: all its tokens, if it is resumed."""
    cached.req_ids.append(name)
    cached.resumed_from_preemption.append(resumed_with is not None)
    cached.new_token_ids.append(resumed_with or [])
    cached.new_block_ids.append((blocks,))
    cached.num_computed_tokens.append(num_computed)
