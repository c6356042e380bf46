"""A short part of `make fuzz`: each target for some seconds, from a fixed seed."""

import pytest
from fuzz.run import fuzz
from fuzz.targets import TARGETS

SECONDS = 2.5  # of each target


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_gives_a_right_result_or_one_line(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # no call may write into the current folder
    tally = fuzz(seed=0, seconds=SECONDS, names=[name])
    assert not tally.failures, "\n".join(map(str, tally.failures))
    assert tally.tried[name]
    assert not list(tmp_path.iterdir())
