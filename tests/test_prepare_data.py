"""`experiments.prepare_data` makes tokens once, before the training that reads them."""

import pytest

from experiments import prepare_data, train
from experiments.data import batches
from experiments.run.config import parse
from experiments.run.errors import DataError
from experiments.run.train_config import TrainConfig


def config(tmp_path, *options):
    text = tmp_path / "text"
    text.mkdir(exist_ok=True)
    for name, count in (("train-0.txt", 400), ("val.txt", 60)):
        words = (f"{name[:3]} line {number} of {number * number} words\n" for number in range(count))
        (text / name).write_text("".join(words))
    paths = [f"data=path:{text}", f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}"]
    return parse(TrainConfig, ["model=smoke", "training.steps=2", "run.progress=none", *paths, *options])


def test_a_training_finds_what_was_prepared(tmp_path, monkeypatch):
    prepare_data.main(config(tmp_path))
    monkeypatch.setattr(batches, "write_token_folder", None)  # it would be called
    prepare_data.main(config(tmp_path))
    train.main(config(tmp_path))


def test_missing_text_is_an_error(tmp_path):
    with pytest.raises(DataError, match="missing"):
        prepare_data.main(config(tmp_path, f"data=path:{tmp_path / 'nowhere.txt'}"))
