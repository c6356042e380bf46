"""Firing rates recorded in training: at the right steps, equal to a plain count, truncated when a run continues."""

import pandas
import pytest
import torch
from same_run import firing_rates_of

from experiments import train
from experiments.data.batches import text_batches
from experiments.models.checkpoint import load_trained
from experiments.models.llama import feed_forward_blocks
from experiments.run.errors import DataError
from experiments.training import firing


def test_the_last_rates_are_those_of_the_finished_model_on_held_out_text(make):
    config = make("run.evaluation_tokens=256")
    train.main(config)
    table = firing_rates_of(config)
    assert sorted(set(table["step"])) == [1, 2, 4, 8, 10]
    assert set(table["tokens"]) == {256}
    assert (set(table["study"]), set(table["item"]), set(table["model"])) == ({"local"}, {"train"}, {"tiny"})
    loaded = load_trained(config.run.folder)
    fired, tokens = torch.zeros(2, 32), 0
    inputs = []
    blocks = feed_forward_blocks(loaded.model)
    for block in blocks:
        block.register_forward_pre_hook(lambda block, arguments: inputs.append((block, arguments[0])))
    with torch.no_grad():
        for batch in text_batches(config.data, loaded.tokenizer, 16, 8, 256):
            loaded.model(batch[:, :-1])
            tokens += batch[:, :-1].numel()
    for block, x in inputs:
        fired[blocks.index(block)] += (block.gate_proj(x) > 0).sum((0, 1))
    last = table[table["step"] == 10].sort_values(["layer", "neuron"])
    assert tokens == 256
    assert last["rate"].to_numpy() == pytest.approx((fired / tokens).flatten().numpy(), abs=1e-6)


def test_steps_are_added_and_a_damaged_file_is_named(tmp_path):
    for step in (1, 2):
        firing.append(tmp_path, step, 64, torch.full((2, 3), step / 8), {"item": "run"})
    table = pandas.read_parquet(tmp_path / firing.FILE)
    assert list(table["step"]) == [1] * 6 + [2] * 6
    assert list(table["neuron"]) == [0, 1, 2] * 4
    assert list(table["rate"].unique()) == [1 / 8, 2 / 8]
    (tmp_path / firing.FILE).write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=f"{firing.FILE} is damaged"):
        firing.append(tmp_path, 4, 64, torch.zeros(2, 3), {"item": "run"})
