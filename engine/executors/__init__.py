"""What a core runs its steps on: one runner in this process, or ranks (``engine.distributed``)."""
