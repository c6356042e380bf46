"""The estimated cost of a study."""

import pytest
from pairwise import slow

from experiments.run.config import parse
from experiments.run.train_config import TrainConfig
from experiments.study.definition import load_study
from slurm.cluster import CLUSTERS
from slurm.cost import MEASURED, costs, flops_per_token, study_costs, table, tokens_per_second


def model(*arguments):
    return parse(TrainConfig, list(arguments)).model


def test_operations_of_the_smallest_scale():
    """By hand: 8 layers of 4 K^2 + 3 K N and two norms, the head and its norm, and 6 L K S for attention."""
    k, n, layers, vocabulary, sequence = 2048, 5632, 8, 49152, 2048
    weights = layers * (4 * k * k + 3 * k * n + 2 * k) + vocabulary * k + k
    assert flops_per_token(model("model=0.5b"), sequence) == 6 * weights + 6 * layers * k * sequence


def test_the_measured_model_has_the_measured_throughput():
    for name, speed in MEASURED.items():
        config = parse(TrainConfig, [f"model={name}"])
        assert tokens_per_second(config.model, config.training.sequence_length) == speed
    assert tokens_per_second(model("model=2b"), 2048) < 162_000 / 3
    assert 1_930_000 * 1.5 < tokens_per_second(model("model=11m"), 2048) < 1_930_000 * 4


@pytest.mark.slow
def test_a_study_of_parts_costs_what_they_cost():
    together, parts = study_costs("gpu"), [study_costs(name) for name in load_study("gpu").parts]
    assert sum(one.all_hours for one in together) == pytest.approx(sum(one.all_hours for each in parts for one in each))
    assert len({(one.model, one.tokens) for one in together}) == len(together)


def test_hours_are_tokens_over_throughput():
    (one,) = costs([parse(TrainConfig, ["model=0.5b", f"training.seed={seed}"]) for seed in range(3)])
    assert (one.runs, one.tokens) == (3, 10_000 * 1_048_576)
    assert one.gpu_hours == pytest.approx(10_000 * 1_048_576 / 162_000 / 3600)
    assert one.checkpoint_bytes == model("model=0.5b").parameters * 12 * 3, "two are kept while a third is written"
    assert one.all_hours == pytest.approx(3 * one.gpu_hours)


@pytest.mark.parametrize(
    "name",
    [
        "scaled",
        "variants",
        "sizes",
        "narrow",
        "kernels_in_training",
        "full_shapes",
        "lengths",
        "frontier",
        *slow("gpu"),
    ],
)
def test_the_readme_says_what_each_gpu_study_costs(name):
    found = study_costs(name)
    run = "`make reproduce SCALE=gpu`" if name == "gpu" else f"`study={name}`"
    (line,) = [line for line in (CLUSTERS.parent / "README.md").read_text().splitlines() if line.startswith(f"| {run}")]
    cells = line.split(" | ")
    assert cells[2] == f"{sum(one.all_hours for one in found):.1f}"
    if name != "gpu":
        assert f"{sum(one.runs for one in found)} trainings" in line
        assert cells[1] == "the same" or f"{max(one.tokens for one in found) / 1e6:.0f}M" in cells[1]


@pytest.mark.parametrize("name", ["paper", "l1_sweep"])
def test_the_readme_says_what_the_papers_trainings_cost(name):
    found = study_costs(name)
    (line,) = [line for line in (CLUSTERS.parent / "README.md").read_text().splitlines() if f"| `study={name}`" in line]
    hours = f"{sum(one.all_hours for one in found):,.0f}"
    assert line.split(" | ")[2] == hours
    assert f" {hours} " in table(found).splitlines()[-1]
