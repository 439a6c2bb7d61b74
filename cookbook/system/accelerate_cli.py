"""`accelerate launch` for `child.run_child`, without its traceback after train.py printed why the run ended.

Run as a script with -P, so that no module of the current folder shadows a library.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from accelerate.commands.accelerate_cli import main

    try:
        main()
    except Exception as error:
        sys.path.append(str(Path(__file__).parents[2]))
        from cookbook.system.status import has_noted_exit, note_killed

        # Of several processes torchrun's ChildFailedError, of one CalledProcessError. A signal has a negative code.
        codes = {rank: failure.exitcode for rank, failure in getattr(error, "failures", {}).items()}
        codes = codes or {0: getattr(error, "returncode", 1)}
        note_killed(codes)
        if has_noted_exit() and min(codes.values()) > 0:
            sys.exit(1)
        raise
