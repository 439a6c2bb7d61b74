"""Runs train.py, and saves a state as soon as it was resumed: what came in must go out again, to the last bit.

Usage: RESAVE=folder resave.py [arguments of train.py]
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import train
from cookbook.training.checkpoint import resume
from cookbook.training.checkpoint.saver import Saver

load = resume.load


def load_and_save(checkpoint, trained, restore):
    state = load(checkpoint, trained, restore)
    engine = restore.__self__
    options = dict(keep_last=2, keep_best=0, in_background=False, say=print)
    ranks = dict(rank=engine.world.rank, num_ranks=engine.world.num_processes)
    saver = Saver(Path(os.environ["RESAVE"]), attempt="again", **ranks, **options)
    saver.save(state["step"], engine.pieces(), {**state, "counts": engine.counts()})
    return state


resume.load = load_and_save
sys.exit(train.main())
