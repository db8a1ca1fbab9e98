"""vLLM's CPU build, offline: ``LLM.generate`` with the engine in this process.

``VLLM_CPU_KVCACHE_SPACE`` (GiB) and ``VLLM_CPU_OMP_THREADS_BIND`` come from the environment (``environment_of``).
"""

from typing import Any

from benchmarks.peers.work import Generate, Load, Prompts, run_peer

_BATCHED_TOKENS = 4096


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """Load the engine; see ``Start``."""
    import torch
    import vllm

    llm = vllm.LLM(
        model=load.model,
        dtype="bfloat16",
        max_model_len=load.max_model_len,
        max_num_seqs=load.max_num_seqs,
        max_num_batched_tokens=_BATCHED_TOKENS,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    return generate, {"versions": versions, "max_num_batched_tokens": _BATCHED_TOKENS}


if __name__ == "__main__":
    run_peer(start)
