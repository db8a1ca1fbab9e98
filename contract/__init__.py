"""The words that every kvbaton process shares, without torch."""
