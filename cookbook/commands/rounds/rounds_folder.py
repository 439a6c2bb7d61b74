"""The folder of rounds: what is done, what each round left, and the files that show them as one run. No torch.

    rounds.json                what it was begun with
    rounds/0001/samples.jsonl  prompts, answers and rewards of a round, a line for each prompt
    rounds/0001/run/           its run, with its export
    export                     leads to the newest export
    metrics.jsonl, ...         of all rounds, as of one run

A file is written whole or not at all, and a round's run is over when its status says so: whatever is not there is done
again, with the same result.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from cookbook.commands.rounds import sampler_divergence
from cookbook.commands.rounds.shown import answer_words, prompt_words
from cookbook.commands.shared.find_model import ADAPTER, CACHE
from cookbook.config.recipe import Recipe, dump_recipe
from cookbook.system import status
from cookbook.system.digests import sha256_of
from cookbook.system.files import RecipeError, cannot_write, make_folder
from cookbook.system.record_files import METRICS, RUN, SAMPLES, read_json, read_lines, replace_file

UNSCORED = "unscored.jsonl"
"""Answers that have no rewards yet."""
GIVEN = "model-"
NUM_SHOWN = 4
"""Prompts of a round whose first answers `report` shows."""


class Round:
    """A round in the folder of all."""

    def __init__(self, output_dir: Path, number: int) -> None:
        self.output_dir, self.number = output_dir, number
        self.folder = output_dir / "rounds" / f"{number:04}"
        self.run = self.folder / "run"
        self.samples, self.unscored = self.folder / SAMPLES, self.folder / UNSCORED
        self.export = self.run / "export"
        self.waits = self.folder / "waits.json"

    def folder_for_server(self, digest: str) -> Path:
        """The folder that a server samples with; its name says which weights are in it."""
        return (self.folder / f"{GIVEN}{digest[:12]}").absolute()

    def remove_folder_for_server(self) -> None:
        for left in self.folder.glob(f"{GIVEN}*"):
            left.unlink() if left.is_symlink() else shutil.rmtree(left)

    @property
    def is_over(self) -> bool:
        record = status.read(self.run)
        return record is not None and record["state"] == "finished"

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of its samples; none before they are whole.

        Raises:
            RecipeError: as `read_answers`.
        """
        return read_answers(self.samples) if self.samples.is_file() else []


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of a round's samples, or of its answers that have no rewards yet.

    Raises:
        RecipeError: they are not what `write_lines` wrote.
    """
    lines = read_lines(path, "round")
    lists = ("completions", "ended", "num_tokens", "prompt_ids", "completion_ids")
    are_whole = all(
        isinstance(line.get("row"), int) and all(isinstance(line.get(key), list) for key in lists) for line in lines
    )
    if not lines or not are_whole or len(lines) != len(path.read_bytes().splitlines()):
        raise RecipeError(f"{path}: is damaged; remove it, and a round that is not over samples the same answers again")
    return lines


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write lines to a file, whole or not at all, and wait until they are on the disk.

    Raises:
        RecipeError: the system refuses it.
    """
    make_folder(path.parent)
    try:
        replace_file(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), flush=True)
    except OSError as error:
        raise RecipeError(cannot_write(path, error, "make room, and start again: what is sampled stays")) from None


def earlier_models(current: Round, first_model: str) -> list[Path]:
    """Folders of the models of earlier rounds that are still there, which a server may have kept."""
    exports = [Round(current.output_dir, number).export for number in range(1, current.number)]
    return [Path(first_model), *(export for export in exports if export.is_dir())]


def weights_digest(model: Path) -> str:
    """The digest of a model's weights, or of an adapter's."""
    from cookbook.training.adapters.peft_folder import ADAPTER_WEIGHTS
    from cookbook.training.models import model_source

    if (model / ADAPTER).is_file():
        weights = model / ADAPTER_WEIGHTS
        return sha256_of([weights], cache=CACHE)[weights]
    return model_source.weights_digest(model, cache=CACHE)


def tidy(rounds: Sequence[Round], keep: int) -> None:
    """Remove what no round will read: the checkpoints of finished runs, and all but the newest exports.

    Args:
        rounds: those that are over, in order.
        keep: exports to keep.
    """
    for number, finished in enumerate(rounds, start=1):
        shutil.rmtree(finished.run / "checkpoints", ignore_errors=True)
        if number <= len(rounds) - keep:
            shutil.rmtree(finished.export, ignore_errors=True)


def link_export(output_dir: Path, newest: Round) -> None:
    """Let `export` lead to the newest round's, so that each command finds the model."""
    link, build = output_dir / "export", output_dir / f".export.{os.getpid()}"
    # A link cannot be overwritten; renaming a new one over it leaves no moment without an export.
    build.unlink(missing_ok=True)
    build.symlink_to(newest.export.relative_to(output_dir), target_is_directory=True)
    os.replace(build, link)


def summary_of(number: int, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The numbers of a round's samples."""
    lengths = [length for line in lines for length in line["num_tokens"]]
    return {
        "round": number,
        **(_of_rewards(lines) if "rewards" in lines[0] else {}),
        **({"staleness": number - 1 - lines[0]["policy"]} if lines[0].get("policy") is not None else {}),
        **sampler_divergence.metrics(lines),
        "ended": fmean(has_ended for line in lines for has_ended in line["ended"]),
        "completion_tokens": fmean(lengths),
        **({"turns": fmean(turn for line in lines for turn in line["num_turns"])} if "num_turns" in lines[0] else {}),
        "num_answers": len(lengths),
    }


def _of_rewards(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    rewards = [reward for line in lines for reward in line["rewards"]]
    scores = {name: [score for line in lines for score in line["scores"][name]] for name in lines[0]["scores"]}
    of_functions = {f"reward_{name}": fmean(values) for name, values in scores.items()} if len(scores) > 1 else {}
    alike = fmean(len({*line["rewards"]}) == 1 for line in lines)
    return {"reward": fmean(rewards), "reward_std": pstdev(rewards), **of_functions, "groups_alike": alike}


def show_as_one_run(output_dir: Path, recipe: Recipe, rounds: Sequence[Round]) -> int:
    """Write the metrics of all rounds with their steps counted on, and what the other commands look for in a run's
    folder. Returns the steps so far.

    Args:
        rounds: those with samples, in order.
    """
    metrics: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    record: dict[str, Any] = {}
    step = 0
    for finished in rounds:
        lines = finished.lines
        if lines:  # a user may have removed those of a round that is over
            waits = read_json(finished.waits) or {}
            metrics.append({"step": step, **summary_of(finished.number, lines), **waits})
        shown += [_answer_shown(step, finished.number, line) for line in lines[:NUM_SHOWN]]
        steps = read_lines(finished.run / METRICS)
        metrics += [line | {"step": step + line["step"]} for line in steps]
        step += max((line["step"] for line in steps), default=0)
        record = read_json(finished.run / RUN) or record
    write_lines(output_dir / METRICS, metrics)
    write_lines(output_dir / SAMPLES, shown)
    replace_file(output_dir / "recipe.yaml", dump_recipe(recipe))
    if record:
        replace_file(output_dir / RUN, json.dumps(record, indent=2) + "\n")
    return step


def _answer_shown(step: int, number: int, line: dict[str, Any]) -> dict[str, Any]:
    reward = {"reward": line["rewards"][0]} if "rewards" in line else {}
    return {"step": step, "round": number, "prompt": prompt_words(line), "completion": answer_words(line, 0), **reward}
