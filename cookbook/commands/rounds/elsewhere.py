"""Rounds of two commands that share a folder alone: one samples, on a machine of its own maybe, and one trains.

What each waits for is a file that appears whole: the trainer for a round's samples, the sampler for the end of the run
whose weights sample the next round. So both may be killed and started again, in any order. No torch.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cookbook.commands.rounds import rounds_folder, sampled_ahead
from cookbook.commands.rounds.round_samples import Sampling, write_samples
from cookbook.commands.rounds.rounds_folder import Round
from cookbook.config.sections import RoundsSection
from cookbook.system.console import say
from cookbook.system.files import RecipeError
from cookbook.system.record_files import ROUNDS, read_json

ELSEWHERE = "sampled_elsewhere"
"""Key of rounds.json: whether who trains waits for samples, or samples by itself."""
LOOK_SECONDS = 0.5
"""Between two looks into the folder."""
END_SECONDS = 10.0
"""Time that a sampler which was stopped may take to end."""


def await_trainer(output_dir: Path) -> None:
    """Wait until a command that trains has begun rounds in a folder."""
    record = output_dir / ROUNDS
    if not record.is_file():
        say(f"waits for `cookbook rounds RECIPE --only train` to begin in {output_dir}", flush=True)
        _wait_until(record.is_file)


def await_samples(current: Round, recipe_name: str) -> float:
    """Wait until a round has samples; the seconds that it took."""
    begun = time.monotonic()
    if not current.samples.is_file():
        command = f"cookbook rounds {recipe_name} --only sample"
        say(
            f"ROUND {current.number}: waits for its samples, from `{command}` on a machine that has this folder",
            flush=True,
        )
        _wait_until(current.samples.is_file)
    return time.monotonic() - begun


def check_samples(current: Round, rounds: RoundsSection, first_model: str) -> None:
    """Compare the weights that sampled a round with those that had to.

    Raises:
        RecipeError: they are others.
    """
    policy = sampled_ahead.policy_of(current.number, rounds)
    model = Round(current.output_dir, policy).export if policy else Path(first_model)
    wanted = {"policy": policy, "weights": rounds_folder.weights_digest(model)}
    for line in current.lines:
        named = {key: line.get(key) for key in wanted}
        if named != wanted:
            raise RecipeError(
                f"{current.samples}: was sampled by {named['weights']} of round {named['policy']}, and the weights of"
                f" round {policy} are {wanted['weights']}, {model}; remove it, and the round is sampled again"
            )


def exports_to_keep(rounds: RoundsSection, keep_last: int) -> int:
    """The newest exports that a sampler may yet read: it is at most so many rounds behind."""
    return max(keep_last, rounds.max_staleness + 1)


def sample_all(
    output_dir: Path,
    how: Sampling,
    compare: Callable[[dict[str, Any]], None],
    with_server: Callable[[Sampling], Sampling],
) -> int:
    """Sample all rounds, each as soon as the weights are there that sample it.

    Args:
        compare: raises RecipeError if these are rounds of another recipe.
        with_server: starts a server that stays up, if the recipe wants one.

    Raises:
        RecipeError: the rounds are sampled by the command that trains them.
    """
    rounds = how.recipe.rounds
    assert rounds is not None
    record = None
    for number in range(1, rounds.num_rounds + 1):
        current = Round(output_dir, number)
        policy = sampled_ahead.policy_of(number, rounds)
        if policy and not Round(output_dir, policy).is_over and not current.samples.is_file():
            say(f"ROUND {number}: waits for the weights of round {policy}", flush=True)
            _wait_until(partial(_is_over, Round(output_dir, policy)))
        if (now := read_json(output_dir / ROUNDS)) != record:  # a new start of who trains may have changed the recipe
            record = now
            _refuse_unless_elsewhere(output_dir, record)
            compare(record or {})
        if current.is_over or current.samples.is_file():
            continue
        how = with_server(how)
        write_samples(current, how)
    return 0


def _is_over(earlier: Round) -> bool:
    return earlier.is_over


def _refuse_unless_elsewhere(output_dir: Path, record: dict[str, Any] | None) -> None:
    if not (record or {}).get(ELSEWHERE):
        raise RecipeError(
            f"--only sample: the rounds in {output_dir} are sampled by the command that trains them; start that one"
            " with --only train first"
        )


def _wait_until(is_there: Callable[[], bool]) -> None:
    while not is_there():
        time.sleep(LOOK_SECONDS)
