"""The step loop, and the gate that decides when a step starts."""
