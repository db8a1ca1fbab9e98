"""What a core orders its steps from: one runner in this process, or ranks (``engine.distributed``)."""
