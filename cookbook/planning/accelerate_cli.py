"""`accelerate launch` for `child.run_child`: without its traceback where train.py has said why the run ended.

A script, which Python runs with -P: nothing in the current folder is taken for a library.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from accelerate.commands.accelerate_cli import main

    try:
        main()
    except Exception:  # CalledProcessError of one process, torchrun's ChildFailedError of several
        sys.path.append(str(Path(__file__).parents[2]))
        from cookbook.system.status import has_noted_exit

        if has_noted_exit():
            sys.exit(1)
        raise
