"""Data-parallel ranks that enter each step together: coordinator, participants, and the gate of their steps."""
