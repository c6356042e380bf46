"""The frontier of trained and timed models: times and losses relative to dense, and who wins at equal time."""

import types

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from analysis import markdown, report
from analysis.figures import frontier
from analysis.figures.drawn import Drawn
from analysis.figures.frontier import points

RUN = {"study": "frontier", "activation": "relu", "modification": "none", "l1": 0.0, "text": "text", "layers": 2}
RUN |= {"tokens_trained": 1000, "hidden": 64, "pattern": "p", "tokens": 128}


def arm(loss, time, neurons, seed=0, blocks=None, pruned=None, own_dense=None, **columns):
    """The rows of one training of two layers: its losses, its forward at `time`, a step at twice that, a slower form of
    both, its blocks. Of a sparse one these are sparse; its dense forward takes `own_dense` (None: as long as that of
    the wide dense model), its dense step twice that, and its dense blocks six tenths of it."""
    name = f"{neurons}_{seed}_" + "_".join(map(str, columns.values()))
    run = RUN | {"item": name, "model": f"tiny-ffn{neurons}", "intermediate": neurons, "seed": seed} | columns
    rows = [
        run | {"op": "train", "metric": "validation_cross_entropy", "value": loss},
        run | {"op": "train", "metric": "cross_entropy", "value": loss - 0.1},
        run | {"op": "train", "metric": "throughput", "value": 1 / neurons},
        run | {"op": "train", "metric": "peak_memory", "value": neurons + 96},
    ]
    timed = run | {"item": f"bench_{name}", "op": "model_forward"}
    sparse = columns.get("l1", 0) > 0
    own_dense = own_dense or {64: 10.0, 128: 20.0}[run["hidden"]]
    forms = [("by_layer", "hopper", time), ("dense", "dense_compiled", own_dense)]
    forms = forms if sparse else [("dense", "dense_compiled", time), ("dense", "dense_eager", 2 * time)]
    for plan, backend, each in forms:
        form = timed | {"plan": plan, "backend": backend}
        rows += [form | {"metric": "throughput", "value": 1 / each}, form | {"metric": "energy", "value": 3.0 * each}]
        step = form | {"op": "model_training"}
        rows += [step | {"metric": "throughput", "value": 0.5 / each}, step | {"metric": "peak_memory", "value": each}]
    dense_blocks = blocks and (own_dense * 0.6 if sparse else blocks)
    slower = [("dense", dense_blocks), ("twell_ordered", blocks if sparse else blocks and 2 * blocks)]
    for plan, value in (*slower, ("twell_live", pruned)):
        if value is not None:
            block = timed | {"op": "ffn_forward", "plan": plan, "metric": "time", "value": value / 2}
            rows += [block | {"layer": layer} for layer in (0, 1)]
    return rows


def results(*arms):
    rows = pd.DataFrame([row for rows in arms for row in rows])
    for name in ("layer", "value", "seed"):
        rows[name] = rows.get(name, pd.Series(dtype="float64")).astype("Float64")
    return types.SimpleNamespace(rows=rows, sources=(), name="rows")


DENSE = [arm(3.0, 10.0, 96, blocks=6.0), arm(3.1, 6.0, 48, blocks=3.0)]
SPARSE = {"modification": "hot_exempt", "l1": 1e-2}


def test_losses_and_times_are_relative_to_the_widest_dense_model():
    data = points(results(*DENSE, arm(3.03, 7.0, 96, blocks=4.0, pruned=2.0, **SPARSE)))
    sparse = data[data["kind"] == "L1, hot neurons exempt"].iloc[0]
    assert sparse["change"] == pytest.approx(1.0)
    assert sparse["train_change"] == pytest.approx(0.03 / 2.9 * 100)
    assert sparse[["time", "energy", "step", "memory"]].tolist() == pytest.approx([70] * 4)
    assert (sparse["blocks"], sparse["pruned"]) == (pytest.approx(4 / 6 * 100), pytest.approx(2 / 6 * 100))
    base = data[data["intermediate"] == 96].query("l1 == 0").iloc[0]
    assert (base["change"], base["time"], base["seeds"]) == (0, 100, 1)
    as_trained = data.groupby("intermediate")[["own_steps", "own_memory"]].mean()
    assert as_trained.to_dict("index") == {48: {"own_steps": 50, "own_memory": 75}, 96: dict.fromkeys(as_trained, 100)}


def test_a_sparse_model_is_relative_to_dense_products_on_the_same_card():
    """The card on which the sparse model was timed takes a tenth longer than that of the wide dense model."""
    timed = arm(3.03, 7.7, 96, blocks=4.4, pruned=2.2, own_dense=11.0, **SPARSE)
    sparse = points(results(*DENSE, timed)).set_index("kind").loc["L1, hot neurons exempt"]
    assert sparse[["time", "energy", "step", "memory"]].tolist() == pytest.approx([70] * 4)
    assert (sparse["blocks"], sparse["pruned"]) == (pytest.approx(4 / 6 * 100), pytest.approx(2 / 6 * 100))
    assert sparse["beyond"] == pytest.approx((3.03 / 3.075 - 1) * 100)
    assert sparse["train_beyond"] == pytest.approx((2.93 / 2.975 - 1) * 100)
    # No dense model is as wide; and its blocks are slower without silent neurons, which stay in then.
    wider = arm(3.03, 7.7, 192, blocks=4.0, pruned=5.0, own_dense=17.0, **SPARSE)
    sparse = points(results(*DENSE, wider)).set_index("kind").loc["L1, hot neurons exempt"]
    assert sparse["time"] == pytest.approx(77)
    assert sparse["pruned"] == sparse["blocks"] == pytest.approx(4 / 6 * 100)


def test_a_sparse_model_is_compared_with_the_better_dense_one_at_its_time():
    silu = [arm(2.95, 9.0, 96, activation="silu"), arm(3.0, 6.0, 48, activation="silu")]
    data = points(results(*DENSE, arm(3.03, 8.0, 96, **SPARSE), arm(3.2, 5.0, 96, modification="none", l1=1e-3)))
    assert data.set_index("kind")["beyond"]["L1, hot neurons exempt"] == pytest.approx((3.03 / 3.05 - 1) * 100)
    assert pd.isna(data.set_index("kind")["beyond"]["L1"])  # faster than every dense model
    assert data[data["l1"] == 0]["beyond"].isna().all()
    data = points(results(*DENSE, *silu, arm(3.03, 7.5, 96, **SPARSE)))
    assert data.set_index("kind")["beyond"]["L1, hot neurons exempt"] == pytest.approx((3.03 / 2.975 - 1) * 100)
    silu = [arm(3.0, 7.0, 48, activation="silu")]  # slower than the sparse model: on the line to the narrow ReLU model
    data = points(results(*DENSE, *silu, arm(3.03, 6.5, 96, **SPARSE)))
    assert data.set_index("kind")["beyond"]["L1, hot neurons exempt"] == pytest.approx((3.03 / 3.05 - 1) * 100)


def test_a_training_that_was_not_timed_has_the_mean_time_of_other_seeds():
    arms = [arm(loss + 0.1, time, neurons, seed=1) for loss, time, neurons in ((3.0, 99.0, 96), (3.1, 99.0, 48))]
    untimed = [[row for row in rows if row["op"] == "train"] for rows in arms]
    data = points(results(*DENSE, *untimed, arm(3.2, 1.0, 24, seed=1)[:2])).set_index("intermediate")
    assert data["seeds"].to_dict() == {48: 2, 96: 2}
    assert data["time"].to_dict() == {48: pytest.approx(60), 96: 100}
    assert data["change"][48] == pytest.approx((0.1 / 3.0 + 0.1 / 3.1) / 2 * 100)


def test_seeds_are_compared_with_their_own_dense_models():
    seeds = [arm(3.0 + 0.3 * seed, 10.0, 96, seed) for seed in range(3)]
    seeds += [arm(3.1 + 0.3 * seed, 6.0, 48, seed) for seed in range(3)]
    seeds += [arm((3.0 + 0.3 * seed) * 1.02, 7.0, 96, seed, **SPARSE) for seed in range(3)]
    line = points(results(*seeds)).set_index("kind").loc["L1, hot neurons exempt"]
    assert line["seeds"] == 3
    assert (line["change"], line["change_low"], line["change_high"]) == pytest.approx((2, 2, 2))


@pytest.mark.parametrize(
    ("losses", "verdict"), [([3.02, 3.03, 3.04], "win"), ([3.0, 3.07, 3.15], "draw"), ([3.11, 3.12, 3.13], "loss")]
)
def test_a_verdict_needs_more_than_the_interval(losses, verdict):
    seeds = [
        arm(loss, time, neurons, seed) for seed in range(3) for loss, time, neurons in ((3.0, 10.0, 96), (3.1, 6.0, 48))
    ]
    seeds += [arm(loss, 7.0, 96, seed, **SPARSE) for seed, loss in enumerate(losses)]
    table = report.frontier(results(*seeds)).set_index("kind")
    assert table["verdict"].to_dict() == {"L1, hot neurons exempt": verdict, "dense, ReLU": ""}


def test_the_headline_has_the_best_sparse_model_of_each_size():
    larger = {"hidden": 128, "layers": 4}
    seeds = [
        arm(loss, time, neurons, seed, **larger, model=f"large-ffn{neurons}", **kind)
        for seed in range(3)
        for loss, time, neurons, kind in (
            (2.8, 20.0, 192, {}), (2.9, 10.0, 96, {}), (2.8 + 0.05 * seed, 15.0, 192, SPARSE),
            (2.9, 20.0, 192, {"activation": "silu"}),
        )
    ]  # fmt: skip
    own = [arm(3.03, 8.0, 96, **SPARSE), arm(3.2, 9.0, 96, **SPARSE | {"l1": 3e-2})]
    line = markdown._at_equal_time(report.frontier(results(*DENSE, *own, *seeds)))
    assert line.endswith(
        "cross-entropy at best (L1, hot neurons exempt): TINY undecided (one seed), LARGE a draw "
        "(three seeds); on the training text −0.7% to 0.0%."
    )


def test_without_several_dense_widths_there_is_no_frontier():
    one = results(DENSE[0], arm(3.03, 7.0, 96, **SPARSE))
    assert "dense models of several widths" in frontier(one).missing
    assert report.frontier(one).empty


def test_each_size_has_its_own_frontier():
    larger = {"hidden": 128, "layers": 4}
    others = [arm(2.8, 20.0, 192, **larger, model="large-ffn192"), arm(2.9, 10.0, 96, **larger, model="large-ffn96")]
    data = points(results(*DENSE, *others, arm(2.87, 15.0, 192, model="large", **larger, **SPARSE)))
    assert data["scale"].tolist() == ["tiny", "tiny", "large", "large", "large"]
    sparse = data.set_index("kind").loc["L1, hot neurons exempt"]
    assert (sparse["time"], sparse["change"]) == (pytest.approx(75), pytest.approx(2.5))
    assert sparse["beyond"] == pytest.approx((2.87 / 2.85 - 1) * 100)


def test_lines_join_sparse_models_of_one_width_and_the_others_tell_theirs():
    sparse = [arm(3.03, 7.0, 96, **SPARSE), arm(3.05, 6.5, 96, **SPARSE | {"l1": 3e-2}), arm(3.01, 9.0, 192, **SPARSE)]
    axes = frontier(results(*DENSE, *sparse)).figure.axes[0]
    joined = [
        len(bars.lines[0].get_xdata()) for bars in axes.containers if bars.get_label() == "L1, hot neurons exempt"
    ]
    assert sorted(joined) == [1, 2]
    assert {text.get_text() for text in axes.texts} == {"48", "96", "1e-2", "3e-2", "1e-2 (192)"}


def test_hot_exempt_l1_stands_beside_the_dense_width_with_its_loss(monkeypatch):
    active = {"model": "tiny-ffn96", "modification": "hot_exempt", "l1": 1e-2, "active_pct": 4.0, "seeds": 2}
    other_text = active | {"active_pct": 9.0, "seeds": 1}
    monkeypatch.setattr(report, "summary", lambda _: pd.DataFrame([active, other_text]))
    monkeypatch.setattr(report, "points", points)  # figure H's have the same size
    (line,) = report.sizes(results(*DENSE, arm(3.05, 7.0, 96, **SPARSE))).to_dict("records")
    assert (line["loss_change_pct"], line["active_pct"]) == (pytest.approx(0.05 / 3 * 100), 4.0)
    assert line["same_loss_pct"] == pytest.approx(75)  # half way between 48 and 96 neurons
    better = arm(2.9, 5.0, 24)
    (line,) = report.sizes(results(*DENSE, better, arm(3.05, 7.0, 96, **SPARSE))).to_dict("records")
    assert pd.isna(line["same_loss_pct"])
    assert report.sizes(results(DENSE[0])).empty


def test_a_size_has_the_trainings_of_one_text():
    other = {"text": "another", "tokens_trained": 9}
    elsewhere = [arm(9.0, 1.0, 96, **other), arm(9.5, 0.5, 48, **other), arm(9.6, 1.0, 96, **other, **SPARSE)]
    one = points(results(*DENSE, arm(3.2, 5.0, 24), arm(3.03, 7.0, 96, **SPARSE)))
    both = points(results(*DENSE, arm(3.2, 5.0, 24), arm(3.03, 7.0, 96, **SPARSE), *elsewhere))
    assert_frame_equal(one, both)


def test_the_table_has_the_points_of_the_figure():
    measured = results(*DENSE, arm(3.03, 8.0, 96, blocks=4.0, pruned=2.0, **SPARSE))
    drawn, table = frontier(measured), report.frontier(measured)
    assert isinstance(drawn, Drawn)
    assert not drawn.missing
    assert_frame_equal(drawn.data, points(measured))
    assert table["loss_change_pct"].tolist() == points(measured)["change"].tolist()
    assert report.frontier_costs(measured)["blocks_pct"].tolist() == points(measured)["blocks"].tolist()
    measured.rows = measured.rows[measured.rows["op"] != "model_training"]
    assert "training_step_pct" not in report.frontier_costs(measured)
