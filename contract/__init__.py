"""The types that all kvbaton processes share. Imports no torch."""
