"""Result rows, their provenance, and atomic files."""

import errno
import importlib.metadata
import os
import re
import subprocess

import numpy
import pytest
import torch

from analysis.schema import METRICS, NAMES
from experiments.run import environment, files
from experiments.run.environment import (
    describe_environment,
    device_name,
    git_revision,
    package_versions,
    peak_memory_gb,
    row_environment,
)
from experiments.run.errors import StorageError
from experiments.run.files import atomic_folder, sha256_file, sha256_json, write_atomic, write_json
from experiments.run.output import device_of
from experiments.run.results import make_row, read_rows, write_rows


def row(**fields):
    return make_row(**{"study": "demo", "item": "relu", "op": "train", "metric": "nonzeros", "value": 29.0, **fields})


def test_a_row_has_every_column_and_the_environment():
    made = row(seed=3, gated=True)
    assert tuple(made) == NAMES
    assert made["unit"] == METRICS["nonzeros"][0]
    assert made["torch"] == importlib.metadata.version("torch")
    assert made["device"] == device_name("cpu")
    assert made["revision"] == describe_environment()["revision"]
    assert made["date"].endswith("+00:00")
    assert made["layer"] is None


def test_numbers_of_numpy_and_torch_become_plain():
    made = row(value=torch.tensor(2.5), layer=numpy.int64(3), low=numpy.float32(0.5), dirty=numpy.bool_(True), l1=0)
    assert [type(made[name]) for name in ("value", "layer", "low", "dirty", "l1")] == [float, int, float, bool, float]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speed": 1}, "unknown columns ['speed']"),
        ({"metric": "goodness"}, "unknown metric 'goodness'"),
        ({"value": float("nan")}, "column value must be finite, got nan"),
        ({"low": float("inf")}, "column low must be finite, got inf"),
        ({"value": "29"}, "column value must be float, got '29' (str)"),
        ({"layer": 1.5}, "column layer must be int, got 1.5 (float)"),
        ({"layer": True}, "column layer must be int, got True (bool)"),
        ({"gated": 1}, "column gated must be bool, got 1 (int)"),
        ({"value": None}, "either a value or a reason"),
        ({"missing": "no NVML"}, "either a value or a reason"),
    ],
)
def test_wrong_rows_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        row(**fields)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [row(gated=False, layer=0, seed=1, l1=2e-5), row(value=None, missing='no "NVML", here\nor there')]
    write_rows(tmp_path / "deep" / "rows.csv", rows)
    assert read_rows(tmp_path / "deep" / "rows.csv") == rows


def test_wrong_files_are_refused(tmp_path):
    path = tmp_path / "rows.csv"
    write_rows(path, [row()])
    text = path.read_text()
    path.write_text(text.replace("29.0", "many"))
    with pytest.raises(ValueError, match="column value must be float, got 'many'"):
        read_rows(path)
    path.write_text(text.replace("study", "studio", 1))
    with pytest.raises(ValueError, match=r"columns are not those of analysis\.schema"):
        read_rows(path)


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_half_written_file_is_refused(tmp_path, cut):
    path = tmp_path / "rows.csv"
    write_rows(path, [row(), row(layer=1)])
    path.write_text(path.read_text()[:-cut])
    with pytest.raises(ValueError, match=r"rows\.csv: half-written"):
        read_rows(path)


# --- environment ------------------------------------------------------------------------------------------------------


def test_revision_and_dirtiness(tmp_path, monkeypatch):
    monkeypatch.delenv("TWELL_REVISION", raising=False)
    assert git_revision(tmp_path) == ("unknown", None)
    monkeypatch.setenv("TWELL_REVISION", "abc123")
    assert git_revision(tmp_path) == ("abc123", False)
    monkeypatch.setenv("TWELL_REVISION", "abc123+dirty")
    assert git_revision(tmp_path) == ("abc123", True)
    monkeypatch.delenv("TWELL_REVISION")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    revision, dirty = git_revision(tmp_path)
    assert len(revision) == 40
    assert dirty is False
    (tmp_path / "untracked").write_text("1")
    assert git_revision(tmp_path) == (revision, False)
    (tmp_path / "a").write_text("2")
    assert git_revision(tmp_path) == (revision, True)
    (tmp_path / "inside").mkdir()
    assert git_revision(tmp_path / "inside") == ("unknown", None), "that of another repository says nothing about it"
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    assert git_revision(tmp_path / "link") == (revision, True)


def test_environment_is_complete(tmp_path):
    found = describe_environment()
    assert found["packages"] == package_versions()
    assert {"torch", "transformers", "numpy"} <= set(found["packages"])
    assert found["device"] == row_environment()["device"]
    assert "cores" in found["device"]
    write_json(tmp_path / "environment.json", found)
    assert 0.01 < peak_memory_gb("cpu") < 1e3


# --- files ------------------------------------------------------------------------------------------------------------


def full_disk(*arguments, **options):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    write_atomic(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full_disk)
        with pytest.raises(StorageError, match=r"cannot write result rows at .*rows.csv.*No space left.*GB free"):
            write_atomic(path, "new", "result rows")
    assert [file.name for file in tmp_path.iterdir()] == ["rows.csv"]
    assert path.read_text() == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")  # noqa: PTH110
def test_the_systems_own_full_disk_is_recognised():
    with pytest.raises(OSError, match="No space") as caught, open("/dev/full", "w") as file:  # noqa: PTH123
        file.write("x" * 100_000)
    with pytest.raises(StorageError), files.storage_errors(files.Path("/dev/full"), "x"):
        raise caught.value


def test_other_errors_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError), files.storage_errors(tmp_path, "x"):
        (tmp_path / "absent").read_text()


def fill(path, content, then=lambda: None):
    with atomic_folder(path) as folder:
        (folder / "a").write_text(content)
        then()
        assert not (path / "a").exists() or (path / "a").read_text() == "whole"


def test_an_atomic_folder_is_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "folder"
    with pytest.raises(ZeroDivisionError):
        fill(path, "half", lambda: 1 / 0)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        fill(path, "half", lambda: patch.setattr(files.os, "fsync", full_disk))
    assert list(tmp_path.iterdir()) == []
    fill(path, "whole")
    fill(path, "second")  # another process was faster
    assert (path / "a").read_text() == "whole"
    with atomic_folder(path, replace=True) as folder:
        (folder / "b").write_text("third")
    assert [file.name for file in path.iterdir()] == ["b"]
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_hashes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a").startswith("ba7816bf")
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 1, "b": 3})


def test_the_first_vector_function_is_called_on_one_thread_when_the_device_is_chosen():
    """The first call of MKL's vector functions by two threads at once is a race."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        assert device_of("cpu") == torch.device("cpu")
    assert [event.input_shapes for event in profile.events() if event.name == "aten::cos"] == [[[1]]]


def test_json_has_no_nan(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert not (tmp_path / "a.json").exists()


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        ("model\t: 207\nmodel name\t: Intel(R) Xeon(R) Processor\nstepping\t: 2\n\nmodel name: other",
         "Intel(R) Xeon(R) Processor (model 207, stepping 2), "),
        ("model\t: 143\nmodel name\t: Xeon(R) Platinum 8480+\nstepping\t: 8\n", "Xeon(R) Platinum 8480+, "),
        ("model name\t: A CPU\n", "A CPU, "),
    ],
)  # fmt: skip
def test_a_cpu_whose_name_says_nothing_has_model_and_stepping(cpuinfo, wanted, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(environment, "Path", lambda _: tmp_path / "cpuinfo")
    assert device_name("cpu").startswith(wanted)
