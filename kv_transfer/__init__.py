"""Moves the KV blocks of one request from one engine's cache into another's, or reports why it could not.

Rooms, each of which imports only those after it: ``ranks`` (a data half for each of several ranks), ``control`` (the half
beside the scheduler) and ``data`` (the half beside the KV memory), which do not import each other, ``transports`` (how
bytes cross), ``links`` (the control links) and ``protocol`` (messages, states, and the rules as pure functions).
``connector`` puts them together.
"""
