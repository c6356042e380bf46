"""Tables and claims show every row that the GPU studies will produce: variants, sizes, narrow models, full shapes."""

from dataclasses import replace

import pandas as pd
import pytest
from synthetic_results import TASKS, Run, Study, validation_loss, write_study

from analysis import tables
from analysis.choose import where
from analysis.figures import model_sizes, narrow_dense
from analysis.load import load
from analysis.publish import compact

pytestmark = pytest.mark.filterwarnings("error::analysis.load.NotMade")

SEEDS = (0, 1)
SCALED = Study(
    name="scaled", model="21m", layers=4, hidden=384, intermediate=1056, steps=8, gpu=True, device="NVIDIA H200",
    tasks=TASKS, seeds=SEEDS, l1=(0.0, 1e-5, 1.5e-5, 2e-5, 3e-5), sweep=True,
)  # fmt: skip
VARIANTS = [
    one
    for seed in SEEDS
    for one in (
        Run(f"21m_silu_seed_{seed}", activation="silu", seed=seed),
        Run(f"21m-nongated_l1_0_seed_{seed}", gated=False, seed=seed),
        Run(f"21m-nongated_l1_1.5e-05_seed_{seed}", 1.5e-5, gated=False, seed=seed),
        Run(f"21m_dead_reinit_seed_{seed}", 1.5e-5, modification="dead_neuron_reinit", seed=seed),
        Run(f"21m_l1_warmup_seed_{seed}", 2.25e-4, modification="l1_warmup", seed=seed),
    )
]
NARROW = (384, 576)
FULL = (("0.5b", 8), ("1b", 9), ("1.5b", 10), ("2b", 11))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_study(root, SCALED)
    write_study(root, replace(SCALED, name="variants", runs=tuple(VARIANTS)))
    for model, hidden in (("4m", 128), ("11m", 256)):
        sizes = replace(SCALED, name="sizes", model=model, hidden=hidden, l1=(0.0, 2e-5))
        write_study(root / model, sizes)
    for neurons in NARROW:
        fewer = {"model": f"21m-ffn{neurons}", "intermediate": neurons, "l1": (0.0,)}
        write_study(root / str(neurons), replace(SCALED, name="narrow", **fewer))
    for model, count in FULL:
        runs = tuple(Run(f"{model}_l1_{l1:g}", l1) for l1 in (0.0, 2e-5, 1e-4))
        full = replace(
            SCALED, name="full", model=model, layers=count, hidden=2048, intermediate=5632, steps=2, speed=1.2,
            tasks=(), sweep=False, runs=runs,
        )  # fmt: skip
        write_study(root / model, full)
    return load(root)


def test_sizes_are_compared_at_one_l1_and_one_length_of_training(results):
    rows = results.rows
    share = rows["model"].map({"4m": 0.2, "11m": 0.5}).fillna(1.0)
    rows = rows.assign(tokens_trained=(rows["tokens_trained"].astype("float64") * share).round())
    drawn = model_sizes(replace(results, rows=rows))
    assert not drawn.missing
    change = where(drawn.data, metric="change_pct")
    assert list(change["model"]) == ["4m", "11m", "21m"]
    assert (change["size"] / change["size"].iloc[-1]).tolist() == pytest.approx([0.2, 0.5, 1.0], rel=0.01)
    assert set(drawn.data["l1"]) == {0.0, 2e-5}
    losses = [[validation_loss(Run("x", l1, seed=seed)) for seed in SEEDS] for l1 in (0.0, 2e-5)]
    paired = [(sparse / dense - 1) * 100 for dense, sparse in zip(*losses, strict=True)]
    assert change["value"].tolist() == pytest.approx([sum(paired) / len(paired)] * 3)
    assert set(where(drawn.data, metric="accuracy")["model"]) == {"4m", "11m", "21m"}
    longer = rows.assign(tokens_per_parameter=rows["tokens_per_parameter"] * (1.0 + rows["model"].eq("11m")))
    for fewer in (rows[rows["model"] != "4m"], longer):
        assert "3 sizes trained alike" in model_sizes(replace(results, rows=fewer)).missing
    unscored = rows[~(rows["op"].eq("evaluate") & rows["model"].eq("4m"))]
    assert "the seven tasks" in model_sizes(replace(results, rows=unscored)).missing


def test_sparse_models_stand_beside_narrower_dense_ones(results):
    rows, data = results.rows, narrow_dense(results).data
    kinds = {"dense, fewer neurons": 3, "L1": len(SCALED.l1) - 1, "L1 with a warm-up": 1, "L1, non-gated": 1}
    assert data["kind"].value_counts().to_dict() == kinds
    assert where(data, l1=0.0)["time"].tolist() == pytest.approx([384 / 10.56, 576 / 10.56, 100])
    assert where(data, kind=("dense, fewer neurons", "L1"))["seeds"].eq(len(SEEDS)).all()
    longer = rows.assign(tokens_trained=rows["tokens_trained"].where(~rows["model"].str.contains("-ffn"), 7))
    for others in (rows[~rows["model"].str.contains("-ffn")], longer):
        assert "fewer neurons" in narrow_dense(replace(results, rows=others)).missing
    for table in (tables.scales, tables.tasks, tables.activations):
        assert not {scale for scale in table(results)["scale"] if "ffn" in scale}
    assert not {column for column in tables.hyperparameters(results) if "ffn" in column}


def test_two_models_with_the_most_l1_values_keep_their_large_tables(results):
    kept = compact(results).nonzeros
    items = results.rows[["item", "model"]].drop_duplicates("item").set_index("item")["model"]
    assert set(kept["by_position"]["item"].map(items)) == {"21m", "0.5b"}, "of those with as many, the fewest layers"
    assert set(results.nonzeros["by_position"]["item"].map(items)) > {"4m", "11m", "0.5b", "1b", "2b"}
    rows = results.rows
    more = rows[(rows["model"] == "1b") & (rows["l1"] == 2e-5)]
    more = pd.concat([rows, more.assign(l1=3e-5, item="again_" + more["item"])], ignore_index=True)
    kept = compact(replace(results, rows=more)).nonzeros["by_position"]["item"].map(items)
    assert set(kept) == {"21m", "0.5b"}, "of four L1 values, three are shown"
    without_base = replace(results, rows=rows[~((rows["model"] == "0.5b") & (rows["l1"] == 0))])
    kept = compact(without_base).nonzeros["by_position"]["item"].map(items)
    assert "0.5b" not in set(kept), "a model without a training at L1 = 0 to compare with"
