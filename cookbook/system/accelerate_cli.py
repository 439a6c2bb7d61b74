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
        from cookbook.system.status import has_noted_exit

        # Of several processes torchrun's ChildFailedError, of one CalledProcessError. A signal has a negative code.
        codes = [failure.exitcode for failure in getattr(error, "failures", {}).values()]
        codes.append(getattr(error, "returncode", 1))
        if has_noted_exit() and min(codes) > 0:
            sys.exit(1)
        raise
