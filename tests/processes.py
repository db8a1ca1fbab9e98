"""Signals to child processes."""

import os
import signal
import subprocess


def stop(process: "subprocess.Popen[str]") -> None:
    """Stop the process and wait until it has stopped: its threads may still run after the signal was sent."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
