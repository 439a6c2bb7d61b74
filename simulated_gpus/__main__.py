# SPDX-License-Identifier: Apache-2.0
"""Run a command on simulated GPUs: python -m simulated_gpus COUNT COMMAND ..."""

import os
import sys

from simulated_gpus import SimulationError, environment


def main() -> int:
    """Replace this process with the command, or return 2 where that fails."""
    count, *command = sys.argv[1:] or [""]
    if not count.isdecimal() or not command:
        print("usage: python -m simulated_gpus COUNT COMMAND ...", file=sys.stderr)
        return 2
    try:
        os.execvpe(command[0], command, os.environ | environment(int(count)))  # noqa: S606 - the command is the user's own
    except (SimulationError, OSError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
