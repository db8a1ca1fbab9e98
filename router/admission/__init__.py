"""Requests that wait for workers, and the choice when each of them begins and where."""
