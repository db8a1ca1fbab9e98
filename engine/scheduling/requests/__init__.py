"""The state of a request in the scheduler, its queues, and how it finishes."""
