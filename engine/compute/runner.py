"""One rank: the model, its KV memory, and one forward pass per ``execute_model``.

Decides nothing: what runs is the scheduler's word. Owns the persistent batch, the pool of KV blocks, and the rank's
half of the connector. Rank 0 of several draws the tokens and tells the others, so that all know the same ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from contract.errors import InternalError
from contract.layout import KVLayout
from contract.requests import PoolingParams, SamplingParams
from engine.compute.batch import InputBatch
from engine.compute.forward import ForwardPass, forward_pass
from engine.compute.inputs import IntVector, Outline, PreparedInputs, outline_next, prepare_inputs
from engine.compute.pooling import pool
from engine.compute.profiling import profile_inputs
from engine.compute.staging import on_device
from engine.connector import LayerWatch, RankConnector, RankConnectorPlan
from engine.distributed.group import RankGroup, SingleRank, rank_device
from engine.kv_cache.memory import PagedKVMemory, allocate
from engine.kv_cache.sizing import MemoryProbe, available_kv_bytes, create_probe, profile_lengths
from engine.kv_cache.specs import KVCacheConfig, KVCacheSpec
from engine.models.info import ModelInfo
from engine.models.loading import LoadedModel, load
from engine.outputs import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.prompt_logprobs import PromptLogprobs
from engine.sampling.sampler import Samples, sample
from engine.sampling.sampling_batch import Drawing
from engine.settings import EngineSettings

_T = TypeVar("_T")
_WARM_UP_ID = "warm-up"
_HOST_PROFILE_TOKENS = 512


@dataclass(frozen=True)
class _Begun:
    """A step whose forward pass is under way. states: waits for it; None where it was cut short."""

    inputs: PreparedInputs
    watch: LayerWatch | None
    states: Callable[[], Tensor | None]


class ModelRunner:
    """The life of a rank: load_model → KV start-up (``engine.kv_cache.startup``) → execute_model, step by step."""

    def __init__(
        self, settings: EngineSettings, probe: MemoryProbe | None = None, group: RankGroup | None = None
    ) -> None:
        self._group = group or SingleRank()
        self.device = rank_device(
            settings.device, torch.cuda.device_count(), self._group.rank, self._group.size
        )
        self._settings = settings
        self._probe = create_probe(self.device) if probe is None else probe
        self._loaded: LoadedModel | None = None
        self._forward: ForwardPass | None = None
        self._memory: PagedKVMemory | None = None
        self._batch: InputBatch | None = None
        self._ahead: Outline | None = None
        self._connector: RankConnector | None = None

    @property
    def model_info(self) -> ModelInfo:
        """What was loaded. Raises InternalError before ``load_model``."""
        return _ready(self._loaded, "load_model").info

    @property
    def memory(self) -> PagedKVMemory:
        """The pool. Raises InternalError before ``initialize_from_config``."""
        return _ready(self._memory, "initialize_from_config")

    def load_model(self) -> None:
        """Read the checkpoint and put the weights on the device. Raises SettingError for what cannot be served."""
        torch.set_num_threads(max(1, self._settings.num_threads // self._group.size))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        settings = self._settings
        self._loaded = load(settings.model, settings.dtype, settings.max_model_len, self.device, self._group)
        self._forward = forward_pass(self._loaded, settings, self.device)

    def get_model_info(self) -> ModelInfo:
        """``model_info`` for ``collective_rpc``."""
        return self.model_info

    def echo(self, payload: bytes) -> bytes:
        """Give the payload back: shows that this rank can be talked to."""
        return payload

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each layer needs on this rank, by layer name, first to last."""
        config = _ready(self._loaded, "load_model").config
        spec = KVCacheSpec(
            self._settings.block_size, config.num_kv_heads, config.head_dim, self.model_info.dtype
        )
        return {f"model.layers.{layer}.self_attn": spec for layer in range(config.num_layers)}

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache, after a forward pass without KV over a full batch of dummy tokens.

        On the host the pass is no measurement, so it is short: memory is touched, kernels are made.
        """
        self._probe.start()  # what loading took for a while is none of it
        settings = self._settings
        most = self._settings.max_num_batched_tokens
        num_tokens = min(most, _HOST_PROFILE_TOKENS) if self.device.type == "cpu" else most
        lengths = profile_lengths(num_tokens, settings.max_num_seqs, self.model_info.max_model_len)
        inputs = profile_inputs(lengths)
        with torch.inference_mode():
            hidden = _ready(_ready(self._forward, "load_model").begin(inputs, None)(), "it has profiled")
            if self.model_info.has_head:
                logits = self._logits(hidden, inputs.query_start_loc[1:] - 1)
                self._draw(logits, [SamplingRow(SamplingParams(), (), length, 0) for length in lengths])
                del logits
        del hidden
        return available_kv_bytes(self._probe.read(), settings)

    def initialize_from_config(self, config: KVCacheConfig) -> KVLayout:
        """Allocate the pool and the tables; called exactly once. Returns the layout."""
        settings = self._settings
        self._memory = allocate(config.layout, config.num_blocks, self.device)
        most = min(self.model_info.max_model_len, config.num_blocks * settings.block_size)
        self._batch = InputBatch(settings.max_num_seqs, most, settings.block_size)
        return config.layout

    def warm_up(self) -> None:
        """One step of a dummy request in the null block, which is zeroed again, and the captures: no surprise is left."""
        memory = self.memory
        has_head = self.model_info.has_head
        num_tokens = min(2, self.model_info.max_model_len, self._settings.max_num_batched_tokens)
        dummy = NewRequestData(
            req_id=_WARM_UP_ID,
            prompt_token_ids=[0] * num_tokens,
            sampling_params=SamplingParams() if has_head else None,
            pooling_params=None if has_head else PoolingParams(),
            block_ids=([0],),
            num_computed_tokens=0,
            num_prompt_tokens=num_tokens,
        )
        scheduled = {_WARM_UP_ID: num_tokens}
        self.execute_model(
            SchedulerOutput([dummy], num_scheduled_tokens=scheduled, total_num_scheduled_tokens=num_tokens)
        )
        self.execute_model(SchedulerOutput(finished_req_ids={_WARM_UP_ID}))
        memory.pool[0] = 0
        _ready(self._forward, "load_model").capture(memory.layers)

    def set_connector(self, rank: RankConnector) -> None:
        """Put in the rank's half of the connector and start it on the pool."""
        rank.start(self.memory)
        self._connector = rank

    def open_connector(self, plans: list[RankConnectorPlan]) -> None:
        """Open this rank's half of a connector by its own plan of ``plans`` (rank by rank), and start it on the pool."""
        half = plans[self._group.rank].open()
        try:
            self.set_connector(half)
        except BaseException:
            half.close()
            raise

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: ``begin`` it, and wait."""
        return self.begin(scheduled)()

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Let a step begin: update the batch, forward. What is returned waits, samples, and hands the connector its orders.

        A request draws a token when all its known tokens are computed after this step; the token joins its known
        tokens. Others get an empty list, and so does a request whose logits are not numbers (it is in
        ``num_nans_in_logits``). One that pools draws none; rank 0 has its embedding in ``pooler_output``. Without
        scheduled tokens nothing is computed, and nobody draws anything where the step was cut short.
        """
        _ready(self._batch, "initialize_from_config").update(scheduled)
        self.memory.copy_blocks(scheduled.block_copies)
        begun = self._begin(scheduled) if scheduled.total_num_scheduled_tokens else None
        return partial(self._finish, scheduled, begun)

    def _begin(self, scheduled: SchedulerOutput) -> _Begun:
        inputs = prepare_inputs(_ready(self._batch, "initialize_from_config"), scheduled, self._ahead)
        watch = self._layer_watch(scheduled)
        is_of_answers = inputs.num_tokens == inputs.num_reqs and scheduled.kv_connector_metadata is None
        with torch.inference_mode():
            states = _ready(self._forward, "load_model").begin(
                inputs, self.memory.layers, watch, may_be_cut_short=is_of_answers
            )
        return _Begun(inputs, watch, states)

    def _finish(self, scheduled: SchedulerOutput, begun: _Begun | None) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        if begun is not None:
            with torch.inference_mode():
                output = self._draw_tokens(scheduled, begun)
            self.memory.mark_computed()
        if self._connector is not None:
            if scheduled.kv_connector_metadata is not None:
                self._connector.execute(scheduled.kv_connector_metadata)
            sent, received = self._connector.take_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def cut_short(self) -> None:
        """From any thread: end the step that is under way without results, if nothing is promised for its end.

        That is so in a step of one token for each request, with no orders for the connector.
        """
        if self._forward is not None:
            self._forward.cut_short()

    def shutdown(self) -> None:
        """Stop the connector's rank half, give the pool back, leave the other ranks."""
        if self._connector is not None:
            self._connector.close()
        if self._forward is not None:
            self._forward.close()
        if self._memory is not None:
            self._memory.close()
        self._group.close()

    def _draw_tokens(self, scheduled: SchedulerOutput, begun: _Begun) -> ModelRunnerOutput:
        batch = _ready(self._batch, "initialize_from_config")
        inputs = begun.inputs
        watch = begun.watch
        drawing = Drawing.of_step(batch, scheduled, inputs)  # while the pass is under way
        self._ahead = outline_next(batch, inputs)
        hidden = begun.states()
        if hidden is None:
            self._ahead = None
            return ModelRunnerOutput(was_cut_short=True)
        logits = self._logits(hidden, drawing.last)
        if watch is not None:
            watch.computed()
        prompt_logprobs = PromptLogprobs(
            batch,
            partial(self._logits, hidden),
            self.model_info.vocab_size,
            is_teller=self._group.rank == 0,
        ).of_step(inputs, drawing.states)
        output = drawing.spread(self._draw_all(logits, drawing))
        output.prompt_logprobs_dict = prompt_logprobs
        if self._group.rank == 0:  # hidden states are equal on all ranks
            pool(hidden, inputs, drawing.states, output)
        batch.append_tokens(drawing.states, output.sampled_token_ids)
        return output

    def _draw_all(self, logits: Tensor, drawing: Drawing) -> Samples:
        """By the logits' best tokens, where all draw so and these are known; else row by row."""
        best = _ready(self._forward, "load_model").best_tokens(logits) if drawing.takes_best else None
        if best is not None:
            return Samples(list(best), [0] * len(best), None)
        return self._draw(_repeated(logits, drawing.places), drawing.rows)

    def _draw(self, logits: Tensor, rows: list[SamplingRow]) -> Samples:
        """The same tokens on every rank. Counts of NaN and log probabilities are known to rank 0 alone."""
        draw = _ready(self._forward, "load_model").draw
        drawn = sample(logits, rows, draw) if self._group.rank == 0 else _undrawn(len(rows))
        if self._group.size == 1:
            return drawn
        return replace(drawn, token_ids=self._group.share_tokens(drawn.token_ids))

    def _layer_watch(self, scheduled: SchedulerOutput) -> LayerWatch | None:
        if self._connector is None or scheduled.kv_connector_metadata is None:
            return None
        return self._connector.watch_layers(scheduled.kv_connector_metadata)

    def _logits(self, hidden: Tensor, rows: IntVector) -> Tensor:
        """``[len(rows), vocab_size]`` of these tokens of the step (whole on rank 0 alone)."""
        forward = _ready(self._forward, "load_model")
        if len(rows) == len(hidden):  # in order, as they always are
            return forward.logits(hidden)
        (indices,) = on_device([rows], self.device)
        return forward.logits(hidden[indices])


def _undrawn(num_rows: int) -> Samples:
    return Samples([None] * num_rows, [0] * num_rows, None)


def _repeated(logits: Tensor, places: IntVector | None) -> Tensor:
    """Each row so often as tokens are drawn from it."""
    if places is None:
        return logits
    (indices,) = on_device([places], logits.device)
    return logits[indices]


def _ready(value: _T | None, needed: str) -> _T:
    if value is None:
        raise InternalError(f"the runner was used before {needed}")
    return value
