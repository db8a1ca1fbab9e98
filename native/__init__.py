"""Compiles the C of this project where it is first needed on a machine, and keeps it for this user."""
