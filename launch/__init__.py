"""Starts the processes of one machine and keeps them running; what the command and the library have in common."""
