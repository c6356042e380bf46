"""Records of a training in TensorBoard and Weights & Biases, beside metrics.jsonl."""

import sys
from types import SimpleNamespace

import pytest
from same_run import stop
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments import train
from experiments.run.errors import ConfigError
from experiments.training import metrics
from experiments.training.trackers import scalars


def events(config):
    accumulator = EventAccumulator(str(config.run.folder / "tensorboard"))
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag) for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_gets_every_logged_step_once_also_of_a_run_that_continues(make):
    stop(make("run.log=[tensorboard]", "run.max_steps=4"))
    train.main(config := make("run.log=[tensorboard]"))
    found, records = events(config), metrics.read_metrics(config.run.folder)
    assert [event.step for event in found["cross_entropy"]] == [record["step"] for record in records] == [*range(1, 11)]
    assert [event.value for event in found["cross_entropy"]] == pytest.approx([r["cross_entropy"] for r in records])
    assert [event.step for event in found["validation_cross_entropy"]] == [5, 10]
    layers = [found[f"nonzeros/layer_{layer}"][-1].value for layer in range(2)]
    assert layers == pytest.approx(records[-1]["nonzeros"])
    assert found["nonzeros"][-1].value == pytest.approx(sum(layers) / 2)


def test_wandb_gets_the_options_and_every_logged_step(make, monkeypatch):
    started, sent = [], []

    def init(**options):
        started.append(options)
        return SimpleNamespace(log=lambda values, step: sent.append((step, values)), finish=lambda: sent.append("end"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = make("run.log=[wandb]", "run.study=mine", "run.item=one")
    stop(make("run.log=[wandb]", "run.study=mine", "run.item=one", "run.max_steps=4"))
    train.main(config)
    before, after = ({key: value for key, value in one.items() if key != "config"} for one in started)
    assert before == after, "a run that continues is the same run"
    assert (started[0]["project"], started[0]["name"], started[0]["resume"]) == ("mine", "one", "allow")
    assert started[0]["config"]["training.steps"] == 10
    assert [each if each == "end" else each[0] for each in sent] == [1, 2, 3, 4, "end", *range(5, 11), "end"]
    assert sent[0][1] == scalars(metrics.read_metrics(config.run.folder)[0])


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_anything_is_made(make, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    config = make(f"run.log=[{name}]")
    with pytest.raises(
        ConfigError, match=rf"run.log=\[{name}\] needs the package {name}: python -m pip install {name}"
    ):
        train.main(config)
    assert not config.run.folder.exists()


def test_only_finite_numbers_are_sent():
    record = {"step": 1, "cross_entropy": 2.0, "grad_norm": float("inf"), "backend": ["dense", "x"]}
    found = scalars({**record, "nonzeros": [1.0, 3.0], "dead_fraction": [0.0, 0.5]})
    assert found["nonzeros"] == 2.0
    assert found["dead_fraction/layer_1"] == 0.5
    assert found["sparse_layers"] == 1.0
    assert not {"grad_norm", "step"} & found.keys()
