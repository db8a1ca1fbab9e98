"""A clock for tests of what depends on time."""


class Clock:
    """Stands still until it is moved. now: seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
