"""The prefill role: a worker that computes prompts, lends their KV to decode workers, and embeds texts."""

NICENESS = 5
"""The niceness, as of nice(1), of prefill workers on cores that they share with decode workers.

A user sees each late token of an answer that has begun, and of a prompt only the sum of its delays.
"""
