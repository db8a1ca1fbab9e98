"""The protocol between two workers, without I/O and threads: states, messages, orders, and the rules as pure functions."""
