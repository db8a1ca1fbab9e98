"""Executors, which run a core's steps: one runner in this process, or ranks (``engine.distributed``)."""
