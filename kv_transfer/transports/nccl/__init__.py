"""The ``nccl`` transport: groups of two processes between GPUs."""
