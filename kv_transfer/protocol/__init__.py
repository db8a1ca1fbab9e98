"""The protocol between two workers, without I/O and threads: messages, orders, states, and the rules as pure functions."""
