"""Starts and removes workers. ``launcher.py`` is the interface, and ``registry.py`` opens a launcher by its name.

Each launcher has a module or a folder of its own (``local``, ``docker``) and imports no other.
"""
