"""What tests do to child processes."""

import os
import signal
import subprocess


def stop(process: "subprocess.Popen[str]") -> None:
    """Stop it, and wait until it is: a signal that was sent is one that its threads may not have heard yet."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
