"""The profile run: a full step without KV, after which the memory that is left is the KV cache's."""

from contract.sampling import SamplingParams
from engine.compute.forward import ForwardPass
from engine.compute.profiling import null_layers, profile_inputs
from engine.compute.rank_sampler import RankSampler
from engine.kv_cache.sizing import profile_lengths
from engine.models.loading import LoadedModel
from engine.sampling.logits_processors import SamplingRow
from engine.settings import EngineSettings

_HOST_TOKENS = 512
"""On the host nothing is measured, so the run is short: it touches memory and compiles kernels."""


def profile_run(
    loaded: LoadedModel, forward: ForwardPass, sampler: RankSampler, settings: EngineSettings
) -> None:
    """Take all memory that steps take beside the KV cache: workspaces, and a full batch of dummy tokens with its logits.

    The batch has ``max_num_seqs`` requests, since each has a row of logits, which is sampled. In inference mode.
    """
    device = sampler.device
    forward.reserve(null_layers(loaded, settings.block_size, device))
    most = settings.max_num_batched_tokens
    num_tokens = min(most, _HOST_TOKENS) if device.type == "cpu" else most
    lengths = profile_lengths(num_tokens, settings.max_num_seqs, loaded.info.max_model_len)
    inputs = profile_inputs(lengths)
    hidden = forward.begin(inputs, None)()
    assert hidden is not None, "nothing interrupts it"
    if loaded.info.has_head:
        logits = sampler.whole_logits(hidden, inputs.query_start_loc[1:] - 1)
        rows = [SamplingRow(SamplingParams(), (), length, 0) for length in lengths]
        sampler.begin_rows(logits, rows).read()
