"""Protects rounds that are sampled while an earlier one trains: by which weights, and to the same end whenever killed.

python -m pytest -q -m "slow or not slow" tests/test_rounds_ahead.py
"""

import fcntl
import json
import shutil
import threading

import pytest

from cookbook.commands.cli import main
from cookbook.commands.rounds import loop, sampled_ahead
from cookbook.config.sections import RoundsSection
from cookbook.training.models.model_source import weights_digest
from tests.test_rounds import ROUNDS, arguments, forked, model, read, release_folders, settings, start  # noqa: F401

AHEAD = ROUNDS | {"num_rounds": 4, "max_staleness": 1}


@pytest.mark.parametrize(
    ("max_staleness", "policies", "sampled_beside"),
    [(0, [0, 1, 2, 3], [1, 2, 3, 4]), (1, [0, 0, 1, 2], [2, 3, 4, 4]), (2, [0, 0, 0, 1], [3, 4, 4, 4])],
)
def test_which_weights_sample_a_round(max_staleness: int, policies: list[int], sampled_beside: list[int]):
    rounds = RoundsSection(num_rounds=4, prompts_per_round=1, max_staleness=max_staleness)
    assert [sampled_ahead.policy_of(number, rounds) for number in (1, 2, 3, 4)] == policies
    assert [sampled_ahead.last_sampled_beside(number, rounds) for number in (1, 2, 3, 4)] == sampled_beside


@pytest.mark.slow
def test_a_round_is_sampled_by_older_weights_whose_probabilities_its_ratios_have(lab, forked, model, tmp_path, capsys):  # noqa: F811
    values = settings(tmp_path, model, rounds=AHEAD, run__keep_last=4)
    assert start(lab, values) == 0, capsys.readouterr()
    out = tmp_path / "out"
    exports = [out / f"rounds/{number:04}/run/export" for number in (1, 2, 3, 4)]
    digests = [weights_digest(folder, cache=tmp_path) for folder in (model, *exports)]
    samples = [read(out / f"rounds/{number:04}/samples.jsonl") for number in (1, 2, 3, 4)]
    assert [{line["weights"] for line in lines} for lines in samples] == [{digests[i]} for i in (0, 0, 1, 2)]
    ratios = [
        next(line["ratio"] for line in read(folder.parent / "metrics.jsonl") if "loss" in line) for folder in exports
    ]
    # The first step of a round has the weights that sampled in round 1 alone.
    assert ratios[0] == pytest.approx(1, abs=1e-4)
    assert all(abs(ratio - 1) > 1e-3 for ratio in ratios[1:])
    shown = [line for line in read(out / "metrics.jsonl") if "reward" in line]
    assert [line["staleness"] for line in shown] == [0, 1, 1, 1]
    assert all({"trainer_wait", "sampler_wait"} <= line.keys() for line in shown[:3])


def test_a_round_that_cannot_be_sampled_yet_is_named(lab, model, tmp_path, capsys, monkeypatch):  # noqa: F811
    values, out = settings(tmp_path, model, rounds=AHEAD), tmp_path / "out"
    monkeypatch.setattr(loop, "launch", lambda *_, **__: 75)
    assert start(lab, values) == 75
    for number in (2, 3):
        (out / f"rounds/{number:04}").mkdir(parents=True, exist_ok=True)
        shutil.copy(out / "rounds/0001/samples.jsonl", out / f"rounds/{number:04}/samples.jsonl")
    with (out / ".rounds.lock").open("w") as file:  # as held by the sampler of a start that was killed
        fcntl.flock(file, fcntl.LOCK_EX)
        sample_none = [*arguments(lab, values), "--sample-until", "0"]
        monkeypatch.setattr(sampled_ahead, "END_SECONDS", 0.1)
        release_folders()
        assert (main(sample_none), "rounds is in use" in capsys.readouterr().err) == (2, True)
        monkeypatch.setattr(sampled_ahead, "END_SECONDS", 60)
        threading.Timer(0.5, fcntl.flock, (file, fcntl.LOCK_UN)).start()
        assert (main(sample_none), "from 1 to" in capsys.readouterr().err) == (2, True)
    for last, said in (("0", "from 1 to"), ("5", "from 1 to"), ("4", "of round 2, which is not over; write 3")):
        release_folders()
        assert main([*arguments(lab, values), "--sample-until", last]) == 2
        assert said in capsys.readouterr().err
    assert not (out / "rounds/0004").exists() and not (out / "rounds/0005").exists()


@pytest.mark.slow
def test_a_round_that_cannot_be_sampled_beside_another_ends_rounds(lab, forked, model, tmp_path, capfd):  # noqa: F811
    plugin = tmp_path / "fails.py"
    plugin.write_text(
        "import sys\n"
        "from cookbook.config.reward_functions import reward\n"
        "@reward\n"
        "def fails(completions, **others):\n"
        "    if '--sample-until' in sys.argv:\n"
        "        raise ValueError('not today')\n"
        "    return [float(len(str(completion))) for completion in completions]\n"
    )
    rounds = AHEAD | {"reward_funcs": "fails", "reward_weights": None}
    assert start(lab, settings(tmp_path, model, rounds=rounds, plugins=[str(plugin)])) == 2
    assert "not today" in capfd.readouterr().err
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["state"], status["exit_code"], status["reason"]) == ("failed", 2, "while round 2 was sampled")
