"""The stages in which requests wait before they can run."""
