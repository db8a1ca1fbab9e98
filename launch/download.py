"""Downloads a model from the Hugging Face hub, in a process of its own that a signal can end at once.

The library downloads by threads that finish their files before an exception of the main thread gets through, which takes
minutes. A killed download leaves partial files in the library's cache, with which the next one continues.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from contract.errors import SettingError
from contract.processes import die_with_parent

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def from_hub(model: str) -> Path:
    """Return the folder of a Hugging Face id in the local cache, after a download if it is not there.

    An exception that a signal raises ends the download. Raises SettingError.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise SettingError(
            f"model is {model!r}: no such folder; to use Hugging Face ids install huggingface_hub",
            param="model",
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        return _downloaded(model)


def _downloaded(model: str) -> Path:
    command = [sys.executable, "-P", "-m", "launch.download", model, str(os.getpid())]
    # A group of its own: a Ctrl-C in the terminal reaches this process alone, which kills the other one.
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        try:
            output, _ = process.communicate()
        finally:
            process.kill()
    answer = json.loads(output) if output else {"problem": f"its process ended with {process.returncode}"}
    if "problem" in answer:
        raise SettingError(
            f"model is {model!r}: no such folder, not in the local Hugging Face cache, and the download failed"
            f" ({answer['problem']})",
            param="model",
        )
    return Path(answer["folder"])


def main() -> None:
    """Run the download of the first argument for the process of the second one, and print the folder as JSON."""
    model, parent = sys.argv[1:]
    die_with_parent(int(parent))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        answer = {"folder": snapshot_download(model, allow_patterns=_WANTED)}
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        answer = {"problem": str(error).strip().splitlines()[0]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
