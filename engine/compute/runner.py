"""One rank: the model, its KV memory, and one forward pass per ``execute_model``.

It decides nothing: the scheduler orders what runs. It owns the persistent batch, the pool of KV blocks, and the rank's
half of the connector. All ranks of several have the same tokens: they find best ones together, and rank 0 draws others and
shares them.
"""

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from contract.errors import InternalError, SettingError
from contract.layout import KVLayout
from contract.sampling import SamplingParams
from engine.compute.batch import InputBatch
from engine.compute.begun_step import BegunStep, RankSampler
from engine.compute.forward import ForwardPass, MakeForward, forward_pass
from engine.compute.inputs import Outline, PreparedInputs, prepare_inputs
from engine.compute.profiling import null_layers, profile_inputs, warm_up_steps
from engine.connector import LayerWatch, RankConnector, RankConnectorPlan, mark_computed
from engine.distributed.group import RankGroup, SingleRank, rank_device
from engine.distributed.token_exchange import join_exchange
from engine.kv_cache.memory import PagedKVMemory
from engine.kv_cache.regions import Regions
from engine.kv_cache.sizing import (
    CudaProbe,
    HostProbe,
    MemoryProbe,
    available_kv_bytes,
    naming_memory,
    profile_lengths,
)
from engine.kv_cache.startup import KVCacheConfig, KVCacheSpec
from engine.models.checkpoint import check_same_model, describe_model
from engine.models.config import ModelInfo
from engine.models.loading import LoadedModel, load
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampling_batch import PromptLogprobs
from engine.settings import EngineSettings
from engine.speculation.ngram import num_right, propose

_T = TypeVar("_T")
# On the host nothing is measured, so the run is short: it touches memory and compiles kernels.
_HOST_TOKENS = 512
_FEW_HOST_TOKENS = 8


class _Model:
    """A loaded model, and what computes with it."""

    loaded: LoadedModel
    forward: ForwardPass
    sampler: RankSampler
    prompt_logprobs: PromptLogprobs

    def __init__(
        self, settings: EngineSettings, device: torch.device, group: RankGroup, make_forward: MakeForward
    ) -> None:
        self._settings = settings
        self._device = device
        self._group = group
        self._make_forward = make_forward
        self._load()

    @property
    def info(self) -> ModelInfo:
        return self.loaded.info

    def close(self) -> None:
        """End its threads, and leave the other engines of its group."""
        self.forward.close()
        if self.loaded.exchange is not None:
            self.loaded.exchange.close()

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the spec of each layer, without windows if they differ and the forward pass has one table for all."""
        config = self.loaded.config
        windows = config.sliding_windows
        if len(set(windows)) > 1 and not self.forward.serves_groups:
            windows = (None,) * config.num_layers
        specs = {}
        for layer, window in enumerate(windows):
            shape = config.kv_shape(layer)
            sizes = self._settings.block_size, shape.num_kv_heads, shape.head_dim
            spec = KVCacheSpec(*sizes, self.info.kv_dtype, shape.parts, window)
            specs[f"model.layers.{layer}.self_attn"] = spec
        return specs

    def check_reload(self) -> None:
        """Raise SettingError if the folder has another model now, or experts are spread over several engines."""
        if self.loaded.exchange is not None:
            raise SettingError(
                f"the experts are spread over the {self._settings.data_parallel_size} engines of a data-parallel group, of"
                " which one cannot read its part alone: start the group again",
                param="data_parallel_size",
            )
        check_same_model(self.loaded.facts, describe_model(self._settings.model))

    def reload(self) -> "_Model":
        """Load the model again; return this object. The old weights are freed first, since both may not fit."""
        self.close()
        del self.loaded, self.forward, self.sampler, self.prompt_logprobs
        gc.collect()  # modules and what computes with them refer to each other
        self._load()
        with torch.inference_mode(), naming_memory("a step in the null block", "max_num_batched_tokens"):
            self.forward.reserve(null_layers(self.loaded, self._settings.block_size, self._device))
        return self

    def _load(self) -> None:
        settings = self._settings
        group = self._group
        with naming_memory("the model", "device"):
            self.loaded = load(
                settings.model,
                settings.dtype,
                settings.max_model_len,
                self._device,
                group,
                settings.fp8_products,
                join_exchange(settings, self._device, group.rank),
                settings.kv_cache_dtype,
            )
        self.forward = self._make_forward(self.loaded, settings, self._device)
        vocab_size = self.loaded.info.vocab_size
        self.sampler = RankSampler(self.forward, group, self._device, vocab_size)
        whole_logits = self.sampler.whole_logits
        self.prompt_logprobs = PromptLogprobs(whole_logits, vocab_size, makes_lists=group.rank == 0)


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
        self._probe = probe or (CudaProbe(self.device) if self.device.type == "cuda" else HostProbe())
        self._loaded: _Model | None = None
        self._regions: Regions | None = None
        self._batch: InputBatch | None = None
        self._ahead: Outline | None = None
        self._unread: BegunStep | None = None
        self._connector: RankConnector | None = None

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the loaded model. Raises InternalError before ``load_model``."""
        return self._model.info

    @property
    def _model(self) -> _Model:
        return _ready(self._loaded, "load_model")

    @property
    def memory(self) -> PagedKVMemory:
        """The pool of the first group of layers. Raises InternalError before ``initialize_from_config``."""
        return self.regions.first

    @property
    def regions(self) -> Regions:
        """The memory of all groups. Raises InternalError before ``initialize_from_config``."""
        return _ready(self._regions, "initialize_from_config")

    def load_model(self, *, make_forward: MakeForward | None = None) -> None:
        """Read the checkpoint and put the weights on the device. Raises SettingError for a model that cannot be served.

        make_forward: makes what computes with the model; None: ``forward_pass``.
        """
        torch.set_num_threads(max(1, self._settings.num_threads // self._group.size))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._loaded = _Model(self._settings, self.device, self._group, make_forward or forward_pass)

    def check_reload(self) -> None:
        """Raise SettingError if the weights of the model's folder cannot take the place of those that are loaded."""
        self._model.check_reload()

    def reload_weights(self) -> ModelInfo:
        """Read the model's weights again, between two steps, and warm up. The KV pool stays; an error leaves no model."""
        model = self._model
        self._loaded = None
        self._loaded = model.reload()
        self.warm_up()
        return self.model_info

    @property
    def runs_ahead(self) -> bool:
        """True if the next step may begin before one is waited for; see ``begin``."""
        forward = self._model.forward
        # The token of an answer that has ended would be in its state.
        return self._settings.enable_run_ahead and forward.runs_ahead and self.model_info.states is None

    def get_model_info(self) -> ModelInfo:
        """Return ``model_info``, for ``collective_rpc``."""
        return self.model_info

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Return the spec of each layer on this rank, by layer name, first to last; see ``_Model``."""
        return self._model.kv_cache_specs()

    def determine_available_memory(self) -> int:
        """Return the bytes for the KV cache, measured by a forward pass without KV over a full batch of dummy tokens.

        On the host nothing is measured, so the pass is short: it touches memory and compiles kernels.
        """
        self._probe.start()  # what only loading took does not count
        with (
            torch.inference_mode(),
            naming_memory("a step of max_num_batched_tokens", "max_num_batched_tokens"),
        ):
            profile_run(self._model, self._settings)
        return available_kv_bytes(self._probe.read(), self._settings)

    def initialize_from_config(self, config: KVCacheConfig) -> KVLayout:
        """Allocate the pools and the tables; called exactly once. Returns the layout of the first group."""
        settings = self._settings
        with naming_memory("the KV pool", "kv_cache_bytes"):
            self._regions = Regions(config, self.device)
        most = config.max_length(self.model_info.max_model_len)
        self._batch = InputBatch(settings.max_num_seqs, most, settings.block_size, config.cache)
        return self.memory.layout

    def warm_up(self) -> None:
        """Run the steps of a dummy request in the null block, which is zeroed again, and capture graphs."""
        assert self._batch is not None, "it comes with the memory"
        max_length = self._batch.token_table.shape[1]
        for scheduled in warm_up_steps(self.model_info, self._settings.max_num_batched_tokens, max_length):
            self.execute_model(scheduled)
        self.regions.clear_null_blocks()  # the warm-up wrote there, and padded rows read zeros of it
        with naming_memory("the last of the CUDA graphs", "gpu_memory_reserve_bytes"):
            self._model.forward.capture(self.regions.layers)

    def set_connector(self, rank: RankConnector) -> None:
        """Set the rank's half of the connector and start it on the pool. One that does not start is closed."""
        with ExitStack() as undo:
            undo.callback(rank.close)
            rank.start(self.regions.lent)
            undo.pop_all()
        self._connector = rank

    def open_connector(self, plans: list[RankConnectorPlan]) -> None:
        """Open this rank's half of a connector by its own plan of ``plans`` (rank by rank), and start it on the pool."""
        self.set_connector(plans[self._group.rank].open())

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step: ``begin`` it, and wait."""
        return self.begin(scheduled)()

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Begin a step. The returned function waits for it, samples, and passes the connector its orders.

        A request gets a token if all its known tokens are computed after this step; the token is added to these. Others
        get an empty list, and so does a request whose logits are not numbers (it is in ``num_nans_in_logits``). One that
        pools gets none; rank 0 has its embedding in ``pooler_output``. Without scheduled tokens nothing is computed, and
        nothing is sampled if the step was interrupted.

        If it ``runs_ahead``, the next step may begin before this one is waited for, with none but requests of this one, each
        by the one token that this one samples: that token does not leave the device.
        """
        model = self._model
        batch = _ready(self._batch, "initialize_from_config")
        # The step before still runs: its sampling is launched now, so that its tokens feed this step on the device.
        unread = self._unread
        if unread is not None:
            unread.sample()
            self._ahead = unread.next_outline
        batch.update(scheduled)
        if scheduled.block_copies:
            self.regions.copy_blocks(scheduled.block_copies)  # before the pass, which writes into the copies
        metadata = scheduled.kv_connector_metadata
        begun = None
        if scheduled.total_num_scheduled_tokens > 0:
            inputs = prepare_inputs(batch, scheduled, self._ahead)
            if unread is not None:
                inputs = replace(inputs, fed=unread.tokens_of(inputs.req_ids))
            watch = None
            if self._connector is not None and metadata is not None:
                watch = self._connector.watch_layers(metadata)
            states = _launch(model.forward, inputs, self.regions, watch, scheduled)
            begun = BegunStep(scheduled, batch, inputs, watch, states, model.sampler, model.prompt_logprobs)
        self._unread = begun
        return partial(self._finish, scheduled, begun)

    def _finish(self, scheduled: SchedulerOutput, begun: BegunStep | None) -> ModelRunnerOutput:
        output = ModelRunnerOutput()
        if begun is not None:
            is_newest = self._unread is begun
            if is_newest:
                self._unread = None
            output = begun.read()
            if scheduled.scheduled_spec_decode_tokens and (states := self.regions.states) is not None:
                begun.roll_back(output, states, self._model.loaded.model.recurrent)
            if self._batch is not None:
                _add_drafts(self._batch, scheduled, output)
            if is_newest:
                self._ahead = begun.next_outline
            # What transfers wait for before they read blocks of this step.
            mark_computed(self.regions.lent)
        if self._connector is not None:
            if scheduled.kv_connector_metadata is not None:
                self._connector.execute(scheduled.kv_connector_metadata)
            sent, received = self._connector.get_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def execute_dummy_batch(self) -> None:
        """Make a forward pass of one token in the null block, so that other ranks with tokens can make theirs."""
        with torch.inference_mode():
            self._model.forward.begin(profile_inputs([1]), self.regions.layers)()

    def interrupt(self) -> None:
        """End the running step without results, from any thread, if it holds only answers and has no connector's orders."""
        if self._loaded is not None:
            self._loaded.forward.interrupt()

    def shutdown(self) -> None:
        """Stop the connector's rank half, free the pool, leave the other ranks."""
        if self._connector is not None:
            self._connector.close()
        if self._loaded is not None:
            self._loaded.close()
        if self._regions is not None:
            self._regions.close()
        self._group.close()


def _launch(
    forward: ForwardPass,
    inputs: PreparedInputs,
    regions: Regions,
    watch: LayerWatch | None,
    scheduled: SchedulerOutput,
) -> Callable[[], Tensor | None]:
    """Begin the forward pass of a step; see ``ForwardPass.begin``."""
    states = regions.states
    # Only such a step may end without results: it is cheap to compute again, and publishes nothing. A state would absorb
    # its tokens twice.
    is_cheap = scheduled.is_decode_only and scheduled.kv_connector_metadata is None and states is None
    if states is not None:
        inputs = replace(inputs, states=states.states)
        states.begin(inputs.state_step, inputs.req_ids)
    with torch.inference_mode():
        hidden = forward.begin(inputs, regions.layers, watch, may_be_interrupted=is_cheap)
    return hidden if states is None else states.finishing(inputs.state_step, hidden)


def _add_drafts(batch: InputBatch, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
    """Propose the drafts that were requested behind the tokens of a step, and compare those that it would have proposed."""
    if num_drafts := scheduled.num_draft_tokens:
        output.spec_token_ids = [
            propose(batch.known_tokens(key), num_drafts.get(key, 0)) for key in output.req_ids
        ]
    for key, num_tokens in scheduled.num_compared_tokens.items():
        state = batch.requests.get(key)
        # A step that runs ahead may have removed it.
        if state is not None and state.row is not None and key in output.req_id_to_index:
            found = num_right(batch.known_tokens(key), num_tokens)
            if found is not None:
                output.num_right_drafts[key] = found


def _ready(value: _T | None, needed: str) -> _T:
    if value is None:
        raise InternalError(f"the runner was used before {needed}")
    return value


def profile_run(model: _Model, settings: EngineSettings) -> None:
    """Take all memory that steps take beside the KV cache: workspaces, and a full batch of dummy tokens with its logits.

    The batch has ``max_num_decode_tokens`` requests, as many as rows of logits may be sampled. In inference mode.
    """
    loaded = model.loaded
    sampler = model.sampler
    device = sampler.device
    model.forward.reserve(null_layers(loaded, settings.block_size, device))
    most = settings.max_num_batched_tokens
    # Recurrent layers run once for each request, or even for each token.
    num_on_host = min(most, _HOST_TOKENS if loaded.info.states is None else _FEW_HOST_TOKENS)
    num_tokens = num_on_host if device.type == "cpu" else most
    lengths = profile_lengths(num_tokens, settings.max_num_decode_tokens, loaded.info.max_model_len)
    inputs = profile_inputs(lengths)
    hidden = model.forward.begin(inputs, None)()
    assert hidden is not None, "nothing interrupts it"
    if loaded.info.has_head:
        logits = sampler.whole_logits(hidden, inputs.query_start_loc[1:] - 1)
        rows = [SamplingRow(SamplingParams(), (), length, 0) for length in lengths]
        sampler.begin_rows(logits, rows).read()
