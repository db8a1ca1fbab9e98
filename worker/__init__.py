"""An engine and a connector wired for a role."""
