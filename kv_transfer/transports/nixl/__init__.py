"""The ``nixl`` transport: one-sided reads by the NIXL library."""
