"""accelerate's own command line, which `cookbook launch` starts by this path: without the report of a run that has said
itself why it ended, by a mistake of the user or a stop. accelerate and torchrun know no such ends, and print 10 to 30
lines of traceback below them.
"""

import sys
from subprocess import CalledProcessError
from typing import Any

SAID = {2, 75}
"""Exit codes of `train.py` for these two; see docs/recipes.md."""


def main() -> None:
    """Run accelerate; where all processes of a run ended with `SAID`, exit with its least code."""
    from accelerate.commands.accelerate_cli import main as accelerate

    try:
        accelerate()
    except CalledProcessError as error:  # of one process
        if error.returncode not in SAID:
            raise
        sys.exit(error.returncode)
    except Exception as error:
        failures: dict[int, Any] = getattr(error, "failures", {})  # of torchrun's ChildFailedError, by rank
        codes = {failure.exitcode for failure in failures.values()}
        if not codes or codes - SAID:
            raise
        sys.exit(min(codes))


if __name__ == "__main__":
    main()
