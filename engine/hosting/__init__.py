"""The thread or process in which an engine runs, and its messages."""
