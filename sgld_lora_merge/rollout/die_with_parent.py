"""Runs a command that the kernel kills when its parent ends: ``python die_with_parent.py PARENT COMMAND ...``.

Run by its path, so that nothing is imported first. The parent is the thread that started this process. What a worker of
Ray starts is also given its usual priority back: Ray runs its workers at niceness 15.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed; the engine could outlive the process that started it")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the process that started this one has ended")
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    except PermissionError:
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        print(f"runs at niceness {niceness}; with RAY_worker_niceness=0 in Ray's environment it would not", flush=True)
    os.execvp(sys.argv[2], sys.argv[2:])
