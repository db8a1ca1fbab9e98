"""The ``kvbaton`` command: one module a command, settings as flags and as environment variables."""
