"""Files and folders are atomic; impossible places are refused in one line, and no file is left of a refused write."""

import os
import subprocess
import sys
import time

import pytest

from experiments import bench_forward, evaluate, gather_nonzeros, train
from experiments.run import files
from experiments.run.config import entry, parse
from experiments.run.errors import CheckpointError, RunError, StorageError
from experiments.run.files import atomic_folder, make_folder, sha256_file, sha256_files, write_atomic
from experiments.run.locks import exclusive, is_held


def places(tmp_path):
    (tmp_path / "file").write_text("in the way")
    return [tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("a" * 300), tmp_path / "a" / ("b" * 300)]


@pytest.mark.parametrize("number", range(4))
def test_a_place_that_cannot_be_a_folder_is_refused_and_leaves_no_file(tmp_path, number):
    place, refused = places(tmp_path)[number], r"cannot write results at .*: (File exists|Not a dir|File name)"
    with pytest.raises(StorageError, match=refused):
        make_folder(place, "results")
    for make, path in ((exclusive, place), (atomic_folder, place / "x")):
        with pytest.raises(StorageError, match=refused), make(path, "results"):
            pytest.fail("a folder that cannot be")
    with pytest.raises(StorageError, match="cannot write"):
        write_atomic(place / "rows.csv", "")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_files_that_have_not_changed_are_not_read_again(tmp_path, monkeypatch):
    paths, kept = [tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "cache" / "kept.json"
    read, later = [], time.time() + 60
    monkeypatch.setattr(files, "sha256_file", lambda path: read.append(path.name) or sha256_file(path))
    for path in paths:
        path.write_text(path.name)
    first = sha256_files(paths, kept)
    assert sha256_files(paths, kept) == first == [sha256_file(path) for path in paths]
    assert read == ["a.txt", "b.txt"] * 2, "they may change again at the same time as seen by the file system"
    monkeypatch.setattr(files.time, "time", lambda: later)
    assert sha256_files(paths, kept) == sha256_files(paths, kept) == first
    assert read[4:] == ["a.txt", "b.txt"]
    before = paths[0].stat()
    paths[0].write_text("A.txt")
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sha256_files(paths, kept) == [sha256_file(paths[0]), first[1]], "of another content, size and date the same"
    assert read[6:] == ["a.txt"]
    kept.write_text("half")
    assert sha256_files(paths, kept) == [sha256_file(path) for path in paths]
    kept.unlink()
    kept.mkdir()
    assert sha256_files(paths, kept) == [sha256_file(path) for path in paths], "where nothing can be kept"


def test_a_lock_that_was_there_stays(tmp_path):
    with exclusive(tmp_path, "run"):
        pass
    assert (tmp_path / ".lock").exists()
    with pytest.raises(RunError, match="no"), exclusive(tmp_path, "run"):
        raise RunError("no")
    assert (tmp_path / ".lock").exists()
    with exclusive(tmp_path, "run"):
        assert is_held(tmp_path)


def test_a_lock_ends_with_its_process(tmp_path):
    holder = "import sys, time; from pathlib import Path; from experiments.run.locks import exclusive\n"
    holder += "with exclusive(Path(sys.argv[1]), 'run'):\n print(flush=True); sys.stdin.read(); raise SystemExit"
    with subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        with pytest.raises(RunError, match="another process is running"), exclusive(tmp_path / "run", "run"):
            pass
        process.stdin.close()
        process.wait()
    with exclusive(tmp_path / "run", "run"):
        assert is_held(tmp_path / "run")


@pytest.mark.parametrize("number", range(4))
def test_a_training_refuses_such_places(make, tmp_path, number, caplog):
    config = make(f"run.dir={places(tmp_path)[number]}")
    with pytest.raises(SystemExit) as ended:
        entry(lambda _: train.by_hand(config), type(config), [])
    assert ended.value.code == 1
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_a_finished_run_on_a_read_only_disk_returns_at_once(make, mounted, caplog):
    folder = mounted("10m")  # permissions do not stop root
    config = make(f"run.dir={folder}/run", "training.steps=1")
    other = make(f"run.dir={folder}/other")
    train.by_hand(config)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    caplog.set_level("INFO")
    train.by_hand(config)
    assert caplog.messages[-1] == f"{folder}/run is finished"
    with pytest.raises(StorageError, match=r"cannot write training at .*other: Read-only file system"):
        train.by_hand(other)


@pytest.mark.parametrize(
    ("program", "config", "argument"),
    [
        (gather_nonzeros, gather_nonzeros.GatherConfig, "checkpoint={}"),
        (evaluate, evaluate.EvaluateConfig, "checkpoint={}"),
        (bench_forward, bench_forward.BenchForwardConfig, "checkpoints=[{}]"),
    ],
)
def test_a_measurement_of_nothing_leaves_no_file(program, config, argument, tmp_path):
    (tmp_path / "file").touch()
    arguments = [argument.format(tmp_path / "file"), f"run.dir={tmp_path / 'out'}", "device=cpu"]
    with pytest.raises(CheckpointError, match=r"file is a file: name the folder of the checkpoint"):
        program.main(parse(config, arguments))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]
