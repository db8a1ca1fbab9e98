"""Starts the processes of one machine and keeps them running, for the command and the library."""
