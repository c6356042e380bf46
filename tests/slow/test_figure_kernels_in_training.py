"""analysis.figures.kernels_in_training: which trainings are compared, and that the differences and times are theirs."""

import dataclasses
import json
import warnings

import numpy as np
import pandas as pd
import pytest
import yaml
from synthetic_results import Run, Study, row, write_rows

from analysis import report
from analysis.figures import kernels_in_training
from analysis.load import load
from analysis.publish import write_data

STUDY = Study(name="h200", model="0.5b", layers=6, hidden=2048, intermediate=5632, device="A GPU")
STEPS, EVERY, TOKENS = 400, 10, 65536
FIRST_STEP_S, DENSE_STEP_S, SPARSE_STEP_S, SWITCH = 40.0, 1.0, 0.75, 150
SPARSE_ABOVE, SPARSE_HELD_OUT_ABOVE = 0.004, 0.002


@dataclasses.dataclass(frozen=True)
class Training:
    """A run folder: `backend` of its last step, "dense", or that of all layers but the first from step SWITCH on."""

    item: str
    backend: str = "dense"
    seed: int = 0
    l1: float = 2e-5
    steps: int = STEPS
    study: Study = STUDY
    without: str = ""  # a metric that metrics.jsonl lacks

    @property
    def plan(self):
        return "dense" if self.backend == "dense" else "by_layer"

    def logged(self):
        return [1, *range(EVERY, self.steps + 1, EVERY)]

    def cross_entropy(self):
        """Nats/token at the logged steps; the sparse run is a fixed amount above the dense one of its seed."""
        steps = np.array(self.logged())
        noise = np.random.default_rng(self.seed).normal(0, 0.05, len(steps))
        return 4 + 6 * np.exp(-steps / 60) + noise + (self.backend != "dense") * SPARSE_ABOVE

    def held_out(self, step):
        return 4 + 6 * np.exp(-step / 60) + 0.03 * self.seed + (self.backend != "dense") * SPARSE_HELD_OUT_ABOVE

    def is_sparse(self, step):
        return self.backend != "dense" and step > SWITCH

    def seconds(self, step):
        """Of training up to and with `step`."""
        sparse = max(0, step - SWITCH) if self.backend != "dense" else 0
        return FIRST_STEP_S + (step - 1 - sparse) * DENSE_STEP_S + sparse * SPARSE_STEP_S

    def records(self):
        before = 0
        for step, loss in zip(self.logged(), self.cross_entropy(), strict=True):
            layers = range(self.study.layers)
            spent = self.seconds(step) - (self.seconds(before) if before else 0)
            record = {
                "step": step,
                "tokens": step * TOKENS,
                "cross_entropy": loss,
                "nonzeros": [20 + 10 * layer + 2500 * np.exp(-step / 25) for layer in layers],
                "backend": ["hopper" if layer and self.is_sparse(step) else "dense" for layer in layers],
                "capacity": [128 if layer and self.is_sparse(step) else 0 for layer in layers],
                "tokens_per_s": (step - before) * TOKENS / spent,
                "seconds": self.seconds(step),
            }
            if step % 100 == 0 or step == self.steps:
                record["validation_cross_entropy"] = self.held_out(step)
            before = step
            yield {name: value for name, value in record.items() if name != self.without}

    def write(self, root):
        folder = root / self.study.name / self.item
        folder.mkdir(parents=True)
        lines = [json.dumps(record) + "\n" for record in self.records()]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "config.yaml").write_text(yaml.safe_dump({"sparsity": {"l1": self.l1}}), encoding="utf-8")
        fields = {"seed": self.seed, "plan": self.plan, "backend": self.backend, "step": self.steps, "tokens": TOKENS}
        run = Run(self.item, self.l1)
        rows = [
            row(self.study, run, self.item, "train", "validation_cross_entropy", self.held_out(self.steps), **fields)
        ]
        for layer in range(self.study.layers):
            layer_fields = fields | {"layer": layer}
            layer_fields |= {"plan": "csr"} if layer and self.plan != "dense" else {"plan": "dense", "backend": "dense"}
            rows.append(row(self.study, run, self.item, "train", "nonzeros", 20.0 + 10 * layer, **layer_fields))
        write_rows(folder / "rows.csv", rows)


# By their names, the sparse run comes first and the seeds are in another order.
SPARSE, OTHER, DENSE = Training("a_auto", "hopper"), Training("b", seed=1), Training("c")


def loaded(root, *trainings):
    for training in trainings:
        training.write(root)
    return load(root)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("runs"), SPARSE, OTHER, DENSE)


@pytest.fixture(scope="module")
def drawn(three):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks, a layout that does not fit
        return kernels_in_training(three)


def run_of(figure, training):
    return figure.data.query("item == @training.item").set_index("step")


def smoothed(values, window):
    return pd.Series(values).rolling(window, center=True, min_periods=1).mean().to_numpy()


def test_backend_and_seed_are_joined_to_the_curves(drawn):
    runs = drawn.data.drop_duplicates("item").set_index("item")
    assert list(runs["label"]) == ["dense, seed 0", "dense, seed 1", "sparse (hopper), seed 0"]
    assert runs["backend"].to_dict() == {"c": "dense", "b": "dense", "a_auto": "hopper"}
    assert runs["seed"].to_dict() == {"c": 0, "b": 1, "a_auto": 0}
    assert list(run_of(drawn, SPARSE)["cross_entropy"]) == list(SPARSE.cross_entropy())
    assert drawn.missing == ""


def test_the_change_is_to_the_dense_run_of_the_same_seed_and_between_dense_seeds(drawn):
    assert np.allclose(run_of(drawn, SPARSE)["change"], SPARSE_ABOVE, atol=1e-9)
    window = 3  # 8% of 41 records
    between = smoothed(OTHER.cross_entropy() - DENSE.cross_entropy(), window)
    assert np.allclose(run_of(drawn, OTHER)["change"], between)
    assert run_of(drawn, DENSE)["change"].isna().all()
    held_out = run_of(drawn, SPARSE)["validation_change"].dropna()
    assert list(held_out.index) == [100, 200, 300, 400]
    assert np.allclose(held_out, SPARSE_HELD_OUT_ABOVE)
    assert np.allclose(run_of(drawn, OTHER)["validation_change"].dropna(), 0.03)


def test_time_is_that_since_the_first_step(drawn):
    since = {step: SPARSE.seconds(step) - FIRST_STEP_S for step in SPARSE.logged()}
    assert run_of(drawn, SPARSE)["seconds"].to_dict() == since
    assert run_of(drawn, DENSE).loc[STEPS, "seconds"] == (STEPS - 1) * DENSE_STEP_S


def test_sparse_layers_are_those_with_a_capacity(drawn):
    layers = run_of(drawn, SPARSE)["sparse_layers"]
    assert set(layers[layers.index <= SWITCH]) == {0}
    assert set(layers[layers.index > SWITCH]) == {STUDY.layers - 1}
    assert set(run_of(drawn, DENSE)["sparse_layers"]) == {0}
    assert run_of(drawn, DENSE)["nonzeros"].iloc[-1] == pytest.approx(45, rel=1e-3)


def test_throughput_leaves_the_first_record_out(drawn):
    speeds = run_of(drawn, SPARSE)["throughput"]
    assert speeds.iloc[0] == pytest.approx(TOKENS / DENSE_STEP_S)
    assert speeds.iloc[-1] == pytest.approx(TOKENS / SPARSE_STEP_S)


def test_the_difference_is_drawn_for_all_but_the_dense_run_that_it_is_from(drawn):
    axes = drawn.figure.axes[0]
    ends = [line.get_ydata()[-1] for line in axes.lines if not line.get_marker() and len(line.get_xdata()) > 2]
    drawn_ends = [end for end in ends if not np.isnan(end)]
    assert drawn_ends == [run_of(drawn, training)["change"].iloc[-1] for training in (OTHER, SPARSE)]


def test_axes_have_names_and_nothing_is_cut_off(drawn):
    canvas = drawn.figure.canvas
    canvas.draw()
    width, height = drawn.figure.get_size_inches()
    part = drawn.figure.get_tightbbox(canvas.get_renderer())
    assert min(part.x0, part.y0, width - part.x1, height - part.y1) > -0.01
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in drawn.figure.axes)
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(dict.fromkeys(drawn.data["label"]))


def test_a_built_folder_gives_the_same_figure(three, drawn, tmp_path):
    write_data(three, tmp_path)
    again = kernels_in_training(load(tmp_path))
    pd.testing.assert_frame_equal(again.data, drawn.data)
    assert again.caption == drawn.caption


def test_several_sparse_and_dense_seeds(tmp_path):
    more = [Training("a_auto_1", "hopper", seed=1), Training("a_twice", "hopper"), Training("d", seed=2)]
    figure = kernels_in_training(loaded(tmp_path, SPARSE, OTHER, DENSE, Training("c_twice"), *more))
    against = figure.data.drop_duplicates("item").set_index("label")["against"]
    assert against.dropna().to_dict() == {
        "dense, seed 0 (c_twice)": "c",
        "dense, seed 1": "c",
        "dense, seed 2": "c",
        "sparse (hopper), seed 0 (a_auto)": "c",
        "sparse (hopper), seed 0 (a_twice)": "c",
        "sparse (hopper), seed 1": "b",
    }
    assert np.allclose(run_of(figure, more[0])["change"], SPARSE_ABOVE, atol=1e-9)


def test_one_dense_seed_is_drawn_and_the_other_reported_missing(tmp_path):
    figure = kernels_in_training(loaded(tmp_path, SPARSE, DENSE))
    assert set(figure.data["item"]) == {"a_auto", "c"}
    assert figure.missing == "a dense training of another seed"


def test_the_latest_version_of_a_repeated_run_counts(tmp_path):
    before = dataclasses.replace(STUDY, date="2025-01-02T03:04:05+00:00")
    Training(SPARSE.item, "dense", study=before).write(tmp_path / "before")
    figure = kernels_in_training(loaded(tmp_path, SPARSE, DENSE))
    assert list(figure.data["label"].unique()) == ["dense, seed 0", "sparse (hopper), seed 0"]


BIGGER = dataclasses.replace(STUDY, model="1b", layers=8)
ANOTHER = dataclasses.replace(STUDY, name="another")
LATER = dataclasses.replace(STUDY, name="later", date="2031-01-02T03:04:05+00:00")
EARLIER = dataclasses.replace(STUDY, name="earlier", date="2021-01-02T03:04:05+00:00")


def pair(dense_seed=0, **fields):
    return [Training("s", "hopper", **fields), Training("d", seed=dense_seed, **fields)]


GROUPS = {
    "the largest model": (pair(steps=200, study=BIGGER), {"s", "d"}),
    "the most tokens": (pair(steps=500, study=ANOTHER), {"s", "d"}),
    "not fewer tokens": (pair(steps=200, study=ANOTHER), {"a_auto", "c"}),
    "the most runs": ([*pair(l1=1e-4), Training("e", l1=1e-4, seed=1)], {"s", "d", "e"}),
    "only with the seed's dense run": (pair(dense_seed=1, study=BIGGER), {"a_auto", "c"}),
    "of two alike the latest": (pair(study=LATER), {"s", "d"}),
    "not an earlier one": (pair(study=EARLIER), {"a_auto", "c"}),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_choice_among_groups(tmp_path, name):
    others, chosen = GROUPS[name]
    figure = kernels_in_training(loaded(tmp_path, SPARSE, DENSE, *others))
    assert set(figure.data["item"]) == chosen


OTHER_DEVICE = dataclasses.replace(STUDY, device="Another GPU")
BACKEND = "execution.sparse.backend"
MISSING = f"a training with sparse kernels ({BACKEND}=auto on a GPU) and the same with {BACKEND}=dense"


@pytest.mark.parametrize(
    "trainings",
    [
        [DENSE, OTHER],
        [DENSE, Training("r", "reference"), Training("m", "reference", seed=1)],
        [DENSE, dataclasses.replace(SPARSE, without="seconds")],
        [SPARSE, OTHER],
        [SPARSE, Training("c", l1=1e-5)],
        [SPARSE, Training("c", steps=200)],
        [SPARSE, Training("c", study=OTHER_DEVICE)],
    ],
    ids=["dense only", "reference", "no time", "seed", "L1", "steps", "device"],
)
def test_what_cannot_be_compared_is_not_measured(tmp_path, trainings):
    figure = kernels_in_training(loaded(tmp_path, *trainings))
    assert figure.is_placeholder
    assert figure.missing == MISSING
    assert "python -m experiments.train" in figure.caption


def test_whole_trainings_in_the_table_are_those_of_the_figure(three):
    table = report.trainings_compared(three)
    dense, sparse = (one.seconds(STEPS) - FIRST_STEP_S for one in (DENSE, SPARSE))
    assert table["seed"].tolist() == [0], "the pair of one seed"
    assert table["whole_speed"].tolist() == pytest.approx([dense / sparse])
