"""The ``nccl`` transport: blocks by groups of two processes, between GPUs or host memories."""
