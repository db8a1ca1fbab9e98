"""The ``kvbaton`` command: one module per subcommand."""
