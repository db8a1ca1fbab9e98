"""Moves of running answers to other workers, away from those that drain or change their role."""
