"""A staged folder appears complete or not at all, and replaces an old one only when it is on the disk."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lr_attnres.errors import LRAttnResError
from lr_attnres.folders import staging
from lr_attnres.folders.staging import staged_folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("replace", [False, True])
def test_the_folder_appears_at_the_end(replace, tmp_path):
    output = tmp_path / "deep" / "model"
    with staged_folder(output, replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("new")
        assert folder.parent == output.parent and folder.name.startswith(".model")
        assert not output.exists()
    assert contents(tmp_path) == {"deep/model/sub/file": "new"}


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("bug"), KeyboardInterrupt()], ids=repr)
def test_an_exception_leaves_nothing_behind(error, replace, tmp_path):
    with pytest.raises(type(error)), staged_folder(tmp_path / "model", replace) as folder:
        (folder / "file").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_on_request(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    with pytest.raises(LRAttnResError, match="model cannot be written: "), staged_folder(tmp_path / "model") as folder:
        (folder / "new").write_text("new")
    assert contents(tmp_path) == {"model/old": "old"}
    with staged_folder(tmp_path / "model", replace=True) as folder:
        (folder / "new").write_text("new")
        assert contents(tmp_path / "model") == {"old": "old"}
    assert contents(tmp_path) == {"model/new": "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def fail_to_rename(monkeypatch) -> None:
    """Only the last rename fails, when the old folder has been moved aside already."""
    rename = Path.rename

    def failing(self, target):
        if self.name == ".model.partial":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)


def fail_to_sync(monkeypatch) -> None:
    def failing(folder):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(staging, "sync_to_disk", failing)


@pytest.mark.parametrize("fail", [fail_to_rename, fail_to_sync])
def test_the_old_folder_survives_a_failure(fail, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").write_text("old")
    fail(monkeypatch)
    with (
        pytest.raises(LRAttnResError, match="model cannot be written: "),
        staged_folder(tmp_path / "model", replace=True) as folder,
    ):
        (folder / "new").write_text("new")
    assert contents(tmp_path) == {"model/old": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_file_is_synced_before_the_rename(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path).as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with staged_folder(tmp_path / "model", replace=True) as folder:
        (folder / "sub").mkdir()
        for name in ("a", "sub/b"):
            (folder / name).write_text(name)
    staged = {f".model.partial/{name}" for name in ("a", "sub", "sub/b")} | {".model.partial"}
    assert set(synced[:-1]) == staged and synced[-1] == "."  # at last the parent, which holds the new name


KILLED = """
import os, signal, sys
from pathlib import Path
from lr_attnres.folders import staging

def kill(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

output, moment = Path(sys.argv[1]), sys.argv[2]
rename = Path.rename
if moment == "before the rename":
    Path.rename = lambda self, target: kill() if self.name == ".model.partial" else rename(self, target)
elif moment == "before the deletion":
    rmtree, staging.shutil.rmtree = staging.shutil.rmtree, lambda path, **options: (
        kill() if path.name == ".model.deleted" and path.exists() else rmtree(path, **options)
    )
with staging.staged_folder(output, replace=True) as folder:
    (folder / "second").write_text("second")
    if moment == "while writing":
        kill()
"""


@pytest.mark.parametrize(
    "moment, expected",
    [
        ("while writing", {"model/first": "first", ".model.partial/second": "second"}),
        ("before the rename", {".model.deleted/first": "first", ".model.partial/second": "second"}),
        ("before the deletion", {"model/second": "second", ".model.deleted/first": "first"}),
    ],
)
def test_leftovers_of_a_killed_process(moment, expected, tmp_path):
    """At each moment one complete folder is on the disk; the next call deletes the leftovers."""
    with staged_folder(tmp_path / "model", replace=True) as folder:
        (folder / "first").write_text("first")
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "model"), moment])
    assert process.returncode == -signal.SIGKILL
    assert contents(tmp_path) == expected
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "model", replace=True):
        raise RuntimeError("the second attempt fails")
    expected = {name: text for name, text in expected.items() if not name.startswith(".model.partial")}
    assert contents(tmp_path) == expected
    with staged_folder(tmp_path / "model", replace=True) as folder:
        (folder / "third").write_text("third")
    assert contents(tmp_path) == {"model/third": "third"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


HOLDS_A_FOLDER = """
import sys
from pathlib import Path
from lr_attnres.folders.staging import staged_folder
with staged_folder(Path(sys.argv[1])) as folder:
    (folder / "file").write_text("half")
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_the_folder_of_a_killed_process_is_deleted_and_that_of_a_living_one_is_not(tmp_path):
    command = [sys.executable, "-c", HOLDS_A_FOLDER, str(tmp_path / "model")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    (tmp_path / ".other-01234567").mkdir()  # not ours: it has no lock file
    with staged_folder(tmp_path / "second") as folder:
        (folder / "file").write_text("second")
    assert (tmp_path / name / "file").read_text() == "half"
    process.kill()
    process.communicate()
    assert (tmp_path / name / "file").exists()
    with staged_folder(tmp_path / "third"):
        assert not (tmp_path / name).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other-01234567", "second", "third"]
    assert contents(tmp_path) == {"second/file": "second"}


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(staging.fcntl, "flock", no_locks)
    with staged_folder(tmp_path / "first") as first, staged_folder(tmp_path / "second"):
        (first / "file").write_text("first")
    assert contents(tmp_path) == {"first/file": "first"}
