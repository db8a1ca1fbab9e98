"""Moves the KV blocks of one request from one engine's cache into another's, or says clearly that it could not.

Where to read: ``transitions`` (the rules), ``control`` (the half beside the scheduler) with ``sending`` and
``fetching``, ``data`` (the half beside the KV memory), ``transport`` (the seam below it) with ``tcp`` and ``local``,
``links`` and ``handshake`` (how two workers meet), ``connector`` (how it is put together).
"""
