"""Write files that only their owner can read, as required for secrets."""

from pathlib import Path


def write_private(file: Path, text: str) -> Path:
    """Write the text with mode 0600; return the file."""
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(text)
    return file
