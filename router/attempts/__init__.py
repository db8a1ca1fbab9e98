"""The run of one answer: attempts with legs on workers, their failures, and the next attempt."""
