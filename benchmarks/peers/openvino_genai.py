"""OpenVINO GenAI: continuous batching with the CPU plugin, of a model that ``optimum-cli`` exports once.

The export keeps 16-bit floats; the plugin is set to compute in bfloat16. Its KV precision is the default.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Generate, Load, Prompts, run_peer

_CACHE_GIB = 2
_BATCHED_TOKENS = 4096


def start(load: Load) -> tuple[Generate, dict[str, Any]]:
    """Load the engine; see ``Start``."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GIB
    scheduler.max_num_batched_tokens = _BATCHED_TOKENS
    scheduler.max_num_seqs = load.max_num_seqs
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        "INFERENCE_NUM_THREADS": load.num_threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    folder = _exported(load)
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        how = openvino_genai.GenerationConfig()
        how.max_new_tokens = how.min_new_tokens = num_tokens
        how.ignore_eos = True
        how.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(tensors, [how] * len(prompts))
        return [list(map(int, result.m_generation_ids[0])) for result in results]

    versions = {"openvino": openvino.__version__, "openvino_genai": openvino_genai.__version__}
    return generate, {"versions": versions, "properties": properties}


def _exported(load: Load) -> Path:
    folder = Path(load.artefact) / "openvino"
    if not (folder / "openvino_model.bin").exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino"]
        task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        subprocess.run([*command, "--model", load.model, *task, str(folder)], check=True, stdout=sys.stderr)
    return folder


if __name__ == "__main__":
    run_peer(start)
