"""Figure H: losses and costs of sparse models and narrower dense ones, relative to the dense model of the same seed."""

import types

import pandas as pd
import pytest
from synthetic_results import Run, Study, write_study

from analysis import publish, report
from analysis.figures import narrow_dense
from analysis.figures.narrow import points
from analysis.load import load

TRAINED = {"study": "narrow", "activation": "relu", "text": "text", "tokens_trained": 1000, "pattern": ""}
WIDE, ACTIVE = 100, 0.01


def arm(loss, neurons=WIDE, seed=0, silent=0.0, rates=None, **columns):
    """The rows of one training of two layers, its loss on training text 0.1 lower, and the rates of its neurons."""
    run = TRAINED | {"model": "21m" if neurons == WIDE else f"21m-ffn{neurons}", "intermediate": neurons, "seed": seed}
    run |= {"gated": True, "modification": "none", "l1": 0.0} | columns
    name = "_".join(str(run[key]) for key in ("model", "modification", "l1", "seed"))
    rows = [
        run | {"item": name, "op": "train", "metric": "validation_cross_entropy", "value": loss},
        run | {"item": name, "op": "train", "metric": "cross_entropy", "value": loss - 0.1},
    ]
    counted = run | {"item": f"nonzeros_{name}", "op": "nonzeros"}
    for layer in (0, 1):
        rows += [counted | {"layer": layer, "metric": "silent_fraction", "value": silent}]
        rows += [counted | {"layer": layer, "metric": "nonzeros", "value": ACTIVE * neurons}]
    by_neuron = [
        {"study": "narrow", "item": counted["item"], "layer": layer, "neuron": neuron, "rate": rate}
        for layer in (0, 1)
        for neuron, rate in enumerate(rates or ())
    ]
    return rows, by_neuron


def results(*arms):
    rows = pd.DataFrame([row for rows, _ in arms for row in rows])
    for name in ("layer", "value", "seed"):
        rows[name] = rows[name].astype("Float64")
    rates = pd.DataFrame([line for _, of_arm in arms for line in of_arm])
    return types.SimpleNamespace(rows=rows, nonzeros={"by_neuron": rates} if len(rates) else {}, sources=(), name="r")


DENSE = [arm(3.0), arm(3.1, neurons=50)]
SWEEP = [arm(3.03, l1=1e-3, silent=0.2), arm(3.06, l1=1e-2, silent=0.5)]


def line(data, **cells):
    for name, value in cells.items():
        data = data[data[name] == value]
    return data.iloc[0]


def test_losses_on_both_texts_and_live_weights_are_relative_to_the_dense_model():
    data = points(results(*DENSE, *SWEEP, arm(3.3, neurons=150, gated=False, l1=1e-3, silent=0.2)))
    sparse = line(data, kind="L1", l1=1e-3)
    assert sparse["change"] == pytest.approx(1.0)
    assert sparse["train_change"] == pytest.approx(0.03 / 2.9 * 100)
    assert sparse["live"] == pytest.approx(80)
    narrower = line(data, neurons=50)
    assert (narrower["live"], narrower["time"]) == (pytest.approx(50), pytest.approx(50))
    assert line(data, kind="L1, non-gated")["live"] == pytest.approx(0.8 * 150 / 100 * 2 / 3 * 100)


def test_time_is_the_sum_over_the_neurons_firing_rates():
    """A mean rate would give another time: a neuron that always fires costs no more than a dense one."""
    rates = [1.0, 0.01, 0.0, 0.0]
    exempt = arm(3.03, l1=1e-2, modification="hot_exempt", silent=0.5, rates=rates)
    data = points(results(*DENSE, *SWEEP, exempt))
    of_exempt = line(data, kind="L1, hot neurons exempt")
    assert of_exempt["time"] == pytest.approx((1 + 0.795 + 2 * 0.325) / 4 * 100)
    assert of_exempt["pruned"] == pytest.approx((1 + 0.795) / 4 * 100)
    assert data[data["kind"] == "L1"]["time"].isna().all(), "their rates were not kept"


def test_seeds_are_compared_with_the_dense_model_of_their_own():
    more = [arm(3.0 + 0.3 * seed, seed=seed) for seed in (1, 2)]
    more += [arm((3.0 + 0.3 * seed) * 1.01, l1=1e-3, silent=0.2, seed=seed) for seed in (1, 2)]
    data = points(results(*DENSE, *SWEEP, *more, arm(9.0, l1=1e-3, seed=7)))
    assert line(data, l1=1e-3)[["change", "low", "high", "seeds"]].tolist() == pytest.approx([1, 1, 1, 3])


@pytest.mark.parametrize("missing", [DENSE[1:], SWEEP[1:]], ids=["dense models", "sparse models"])
def test_without_two_dense_and_two_sparse_models_there_is_no_figure(missing):
    some = results(*(arm for arm in (*DENSE, *SWEEP) if not any(arm is gone for gone in missing)))
    assert "fewer neurons" in narrow_dense(some).missing
    assert report.narrow(some).empty


def test_the_panel_of_times_is_drawn_where_rates_were_kept():
    known = arm(3.03, l1=1e-2, modification="hot_exempt", rates=[0.5, 0.0])
    for arms, panels in (((), 2), ((known,), 3)):
        drawn = narrow_dense(results(*DENSE, *SWEEP, *arms))
        assert not drawn.missing
        assert sum(axes.axison for axes in drawn.figure.axes) == panels
        assert ("time_pct" in report.narrow(results(*DENSE, *SWEEP, *arms))) or not arms


def test_labels_stand_apart_and_inside():
    crowd = [arm(3.0 + 0.002 * i, neurons=90 - 2 * i) for i in range(4)]
    drawn = narrow_dense(results(*DENSE, *SWEEP, *crowd))
    axes = drawn.figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
    frame = axes.get_window_extent()
    assert len(boxes) == drawn.data["kind"].nunique() + 1  # both ends of the dense models
    for number, box in enumerate(boxes):
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])


def test_the_rates_of_all_sparse_runs_of_the_sweeps_model_are_kept(tmp_path):
    runs = [Run(f"l1_{l1:g}", l1) for l1 in (0.0, 1e-3, 2e-3, 3e-3, 4e-3)]
    runs.append(Run("exempt", 1e-3, modification="hot_exempt"))
    study = Study(name="scaled", model="21m", layers=2, steps=2, sweep=True, runs=tuple(runs))
    kept = publish.compact(load(write_study(tmp_path, study))).nonzeros
    assert set(kept["by_neuron"]["item"]) == {f"nonzeros_{run.item}" for run in runs}
    assert len(set(kept["by_position"]["item"])) < len(runs)
