"""Runs train.py, whose files the kernel refuses to grow from step FIRST to before step LAST, as a full disk does.

Usage: full_disk.py FIRST LAST [arguments of train.py]. A process without room may write no byte (RLIMIT_FSIZE of 0).
From 0 on: before the first file in the output folder.
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train

FIRST, LAST = int(sys.argv.pop(1)), int(sys.argv.pop(1))


def set_room(step: int) -> None:
    limit = 0 if FIRST <= step < LAST else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


if __name__ == "__main__":
    train_step = train.train_step

    def step_with_room(run, *arguments):
        set_room(run.progress.step + 1)
        return train_step(run, *arguments)

    train.train_step = step_with_room
    if FIRST == 0:
        from cookbook.run import stages

        make_run = stages.make_run

        def run_without_room(*arguments, **options):
            run = make_run(*arguments, **options)
            set_room(0)
            return run

        stages.make_run = run_without_room
    sys.exit(train.main())
