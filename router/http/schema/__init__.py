"""Every field of every request body, described once, as JSON Schema.

Code can only read fields that are described here (``Body`` checks), ``strict_api`` rejects all others, and
``/openapi.json`` shows them. To add a field, add one entry here: in ``generation`` if every endpoint that generates has the
field, otherwise in the module of its endpoint.
"""
