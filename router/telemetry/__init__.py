"""The measurements and counts of a router."""
