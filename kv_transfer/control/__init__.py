"""The half of the connector beside the scheduler. It owns the state of all transfers and moves no bytes."""
