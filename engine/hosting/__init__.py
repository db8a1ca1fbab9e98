"""Where an engine core runs: in a thread or in a process of its own, and what crosses the line to its client."""
