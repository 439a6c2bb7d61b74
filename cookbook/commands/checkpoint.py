"""`checkpoint`: what a run can resume from."""

from pathlib import Path
from typing import Annotated

from cookbook.commands.shared.answer_forms import CheckpointAnswer
from cookbook.commands.shared.arguments import AsJson, run_folder
from cookbook.commands.shared.for_programs import answer
from cookbook.system.console import say
from cookbook.training.checkpoint.listing import in_words, list_checkpoints


def checkpoint(
    path: Annotated[Path, run_folder("a run, its checkpoints/, or one checkpoint")], *, as_json: AsJson = False
) -> int:
    """List checkpoints and how to resume; 1 if one is broken."""
    checkpoints = list_checkpoints(path)
    if as_json:
        answer(CheckpointAnswer(checkpoints=checkpoints))
    else:
        say(in_words(checkpoints))
    return 1 if any(checkpoint["broken"] for checkpoint in checkpoints) else 0
