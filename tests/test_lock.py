"""One run per output folder, also when the first is killed, stopped or renames the folder.

python -m pytest -q tests/test_lock.py
"""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, clean_environment

from cookbook.system import lock
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint import write_model

OWNER = """
import sys
import tempfile
import threading
import time
from pathlib import Path
from cookbook.system import lock
lock.hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def own(request):
    """Starts a process that holds a folder."""

    def start(folder: Path) -> subprocess.Popen[str]:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder)],
            env=clean_environment(PYTHONPATH=str(ROOT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(lambda: (owner.kill(), owner.communicate()))
        assert owner.stdout.readline() == "held\n"
        return owner

    yield start
    lock._held_locks.clear()


def test_a_second_run_is_refused_names_the_first_and_touches_nothing(tmp_path, own):
    folder = tmp_path / "run"
    owner = own(folder)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RecipeError, match=f"run is in use by process {owner.pid} on .*, since 2"):
        lock.hold(folder)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not folder.exists()


def test_another_folder_is_free(tmp_path, own):
    own(tmp_path / "run")
    lock.hold(tmp_path / "run2")


def test_the_lock_of_a_killed_run_is_free_and_that_of_a_stopped_one_is_not(tmp_path, own):
    owner = own(tmp_path / "run")
    owner.send_signal(signal.SIGSTOP)
    with pytest.raises(RecipeError):
        lock.hold(tmp_path / "run")
    owner.kill()
    owner.wait()
    lock.hold(tmp_path / "run")
    assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()


def test_a_run_that_ends_is_waited_for_as_long_as_is_asked(tmp_path, own):
    owner = own(tmp_path / "run")
    with pytest.raises(RecipeError, match="is in use"):
        lock.hold(tmp_path / "run", 0.3)
    threading.Timer(0.3, owner.kill).start()
    lock.hold(tmp_path / "run", 60)
    assert str(os.getpid()) in (tmp_path / ".run.lock").read_text()


def test_a_folder_that_its_run_renamed_stays_locked(tmp_path, own):
    folder = tmp_path / "run"
    folder.mkdir()
    own(folder)
    folder.rename(tmp_path / "run.1")
    folder.mkdir()
    with pytest.raises(RecipeError):
        lock.hold(folder)


def test_a_folder_is_the_same_by_whatever_name(tmp_path, own, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path)
    own(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in ("run", "../" + tmp_path.name + "/run", "link/run"):
        with pytest.raises(RecipeError):
            lock.hold(Path(name))


def test_a_lock_that_does_not_say_whose_it_is_still_holds(tmp_path, own):
    own(tmp_path / "run")
    (tmp_path / ".run.lock").write_text("")
    with pytest.raises(RecipeError, match="run is in use; wait"):
        lock.hold(tmp_path / "run")


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"run.output_dir .*file/run: cannot write to .*file \("):
        lock.hold(tmp_path / "file" / "run")


def test_a_folder_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    own = os.geteuid()
    if own == 0:  # who may write anywhere
        os.seteuid(65534)
    try:
        with pytest.raises(RecipeError, match=r"cannot write to .*Permission denied"):
            lock.hold(tmp_path / "run")
    finally:
        os.seteuid(own)


def test_where_files_cannot_be_locked_a_run_begins_and_says_that_nothing_keeps_a_second_one_out(
    tmp_path, monkeypatch, capsys
):
    def without_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    lock.hold(tmp_path / "run")
    assert "this file system has no locks; nothing keeps a second run out of" in capsys.readouterr().err
    assert json.loads(lock.signature(tmp_path / "run"))["pid"] == os.getpid()


def test_where_files_cannot_be_locked_a_model_is_written(tmp_path, monkeypatch):
    def refuse(error: int, descriptor: int, operation: int) -> None:
        raise OSError(error, "no")

    for error in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        monkeypatch.setattr(fcntl, "flock", partial(refuse, error))
        with write_model._lock(tmp_path):
            pass
    monkeypatch.setattr(fcntl, "flock", partial(refuse, errno.EWOULDBLOCK))
    with pytest.raises(BlockingIOError), write_model._lock(tmp_path):
        pass


def test_where_files_cannot_be_locked_the_processes_of_a_machine_wait_all_the_same(tmp_path, monkeypatch):
    """Lustre without -o flock, and NFS without a lock daemon."""
    flock, (cache, temporary) = fcntl.flock, (tmp_path / "cache", tmp_path / "tmp")
    cache.mkdir()
    temporary.mkdir()

    def without_locks(descriptor: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(cache):
            raise OSError(errno.ENOLCK, "No locks available")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", without_locks)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    first, second = cache / "model-1.lock", cache / "model-2.lock"
    with lock.making(first):
        waits = threading.Thread(target=lock.making(first).__enter__, daemon=True)
        waits.start()
        while (owner := lock.owner_of_waited()) is None or not owner["path"].startswith(str(temporary)):
            time.sleep(0.01)
        assert owner["owner"].startswith(f" by process {os.getpid()} on ")
        with lock.making(second):
            waits.join(0.5)
        assert waits.is_alive()
    waits.join(10)
    assert not waits.is_alive()
