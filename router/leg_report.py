"""The workers' reports about one answer, beside its tokens."""

import msgspec

from contract.outputs import EngineOutput, TokenLogprobs, TransferReport


class LegReport(msgspec.Struct):
    """Measured seconds, prompt tokens found in a cache, and the prompt's log probabilities."""

    queue_seconds: float = 0.0
    held_seconds: float = 0.0
    prefill_seconds: float = 0.0
    transfer: TransferReport = TransferReport()
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: EngineOutput, *, has_transfer: bool) -> None:
        """Add the report of a worker. has_transfer: the output's leg waited for the KV before the second token.

        The report of a replay counts only if the replay computed the first token, or the second one.
        """
        if output.first_index == 0 and output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if output.timings is not None:
            if output.first_index == 0:
                self.queue_seconds = output.timings.queue_seconds
                self.held_seconds = output.timings.held_seconds
                self.prefill_seconds = output.timings.prefill_seconds
            if has_transfer:
                self.transfer = output.timings.transfer
