"""An engine and a connector wired for a role; also the supervisor of the processes on one machine."""
