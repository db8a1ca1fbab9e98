"""The choice of workers for a request: pure functions over views of the workers."""
