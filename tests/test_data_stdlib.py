"""The rows of the built-in source: train and test share none, and both together are all. No run.

python -m pytest -q tests/test_data_stdlib.py
"""

import sysconfig
from pathlib import Path

import pytest

from cookbook.training.data import stdlib

COUNT = 300


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A few hundred functions, each with a request of its own, and some that are no rows."""
    functions = [
        f'def f{i}(x):\n    """Add the number {i} to x."""\n    total = x + {i}\n    return total * (1 + 0)\n'
        for i in range(COUNT)
    ]
    functions += ['def none(x):\n    """Only says what it would do."""\n    raise NotImplementedError\n', functions[0]]
    (tmp_path / "many.py").write_text("\n\n".join(functions))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(functions[1].replace("f1", "tested"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    yield tmp_path
    stdlib._pairs.cache_clear()


def test_train_and_test_share_no_row_and_are_all_of_them(library: Path):
    stdlib._pairs.cache_clear()
    answers = {
        split: [row["messages"][1]["content"] for row in stdlib.load_stdlib(split)] for split in ("train", "test")
    }
    assert not {*answers["train"]} & {*answers["test"]}
    assert len(answers["train"]) + len(answers["test"]) == COUNT
    assert 0.02 < len(answers["test"]) / COUNT < 0.09  # 13 of 256
    (first,) = [answer for split in answers.values() for answer in split if answer.startswith("def f7(")]
    assert first == "def f7(x):\n    total = x + 7\n    return total * (1 + 0)"


def test_a_folder_behind_a_link_is_read(library: Path, tmp_path_factory: pytest.TempPathFactory):
    """Some systems keep a part of the standard library elsewhere."""
    stdlib._pairs.cache_clear()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "few.py").write_text((library / "many.py").read_text().split("\n\n")[7].replace("f7", "behind"))
    (library / "linked").symlink_to(elsewhere, target_is_directory=True)
    requests = [row["messages"][0]["content"] for split in ("train", "test") for row in stdlib.load_stdlib(split)]
    assert len(requests) == COUNT + 1 and "Write `def behind(x)`: Add the number 7 to x." in requests
