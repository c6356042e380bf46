"""The file that tells a launcher the progress of a program."""

from experiments.run import progress
from experiments.run.progress import Done, ProgressFile, read_progress


def test_the_last_report_can_be_read(tmp_path):
    assert read_progress(tmp_path) is None
    report = ProgressFile(tmp_path)
    report(1, 7, tokens=2048)
    assert read_progress(tmp_path) == Done(1, 7)
    report(7, 7)
    assert read_progress(tmp_path) == Done(7, 7), "the end is always written"
    assert [path.name for path in tmp_path.iterdir()] == [progress.PROGRESS]


def test_it_is_written_once_a_second_at_most(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    report, seen = ProgressFile(tmp_path), []
    for done in range(20):
        now[0] += 0.25
        report(done, 20)
        seen.append(read_progress(tmp_path).done)
    assert len(set(seen)) == 5
