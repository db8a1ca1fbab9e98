"""The ``docker`` launcher: workers as containers of one Compose project, on one Docker engine."""
