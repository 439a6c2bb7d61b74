"""Fault injection for the tests, controlled by an environment variable; without it nothing here has any effect.

COOKBOOK_FAULTS='[{"rank": 1, "at": "save.after_file", "step": 3, "do": "SIGKILL"}]'
"""

import errno
import json
import os
import signal
import time

VARIABLE = "COOKBOOK_FAULTS"


def is_plan(text: str) -> bool:
    """Return whether `at` can read the plan."""
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(plan, list) and all(isinstance(fault, dict) and fault.keys() >= {"at", "do"} for fault in plan)


def at(point: str, step: int) -> bool:
    """Executes the faults planned for a named point of a step. Returns whether one of them is "nan".

    `do` is a signal name, sent to this process; "ENOSPC", "EROFS" or another errno name, raised as an OSError; "hang",
    which sleeps; or "nan". `rank` "all" means every process; `restart` counts the launcher's starts from 0.
    """
    plan = os.environ.get(VARIABLE)
    if not plan:
        return False
    for fault in json.loads(plan):
        mine = fault.get("rank", "all") in ("all", int(os.environ.get("RANK", "0")))
        now = fault.get("restart", 0) == int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if mine and now and fault["at"] == point and fault.get("step", step) == step:
            return _do(fault["do"])
    return False


def _do(what: str) -> bool:
    if what == "nan":
        return True
    if what == "hang":
        time.sleep(3600)
    elif what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))
    else:
        code = getattr(errno, what)
        raise OSError(code, os.strerror(code))
    return False
