"""Programs that each run one engine: they read orders as lines of JSON and answer each with a line (``work.py``).

Each runs with the Python of its own environment, from the repository's root: ``python -m benchmarks.peers.vllm_cpu``.
"""
