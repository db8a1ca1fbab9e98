"""The admin API of a router: its workers, the autoscaler, metrics and its state."""
