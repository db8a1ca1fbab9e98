"""The environment of the programs that benchmarks start."""

import os


def environment_of(module: str, cores: tuple[int, ...]) -> dict[str, str]:
    """Return this environment with each library's number of threads, and the variables of vLLM's CPU build."""
    own = {
        **os.environ,
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    own.pop("PYTHONPATH", None)
    if module.endswith("vllm_cpu"):
        own |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return own


def service_environment() -> dict[str, str]:
    """Return this environment without settings of a service, so that the defaults are measured."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("KVBATON_")}
