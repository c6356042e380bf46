"""The two readings of the paper's L1: which of our rows stand under each, and which is nearer the paper's numbers."""

import pytest
from synthetic_results import Run, Study, results_of, row

from analysis.claims import l1_factor

WIDTH = 5632


def trained(model, tokens, **by_l1):
    """Trainings with these (active neurons, cross-entropy) by L1, written as l1_2e5 for 2e-5."""
    rows = []
    for name, (active, loss) in by_l1.items():
        l1 = {"none": 0.0, "l1_2e5": 2e-5, "l1_1e4": 1e-4, "l1_1e3": 1e-3, "l1_128e5": 1.28e-3, "l1_2e3": 2e-3}[name]
        study = Study(name="lengths", model=model, intermediate=WIDTH)
        run, item = Run("x", l1), f"{model}_{tokens}_{name}"
        about = {"tokens_trained": int(tokens), "tokens_per_parameter": tokens / 1e8}
        values = {"validation_cross_entropy": loss, "nonzeros": active, "dead_fraction": 0.5}
        rows += [row(study, run, item, "train", metric, value, **about) for metric, value in values.items()]
    return rows


def table(tmp_path, *rows):
    return l1_factor.table(results_of(tmp_path, [line for of in rows for line in of]))


NEAR, FAR = (30.0, 4.0 * 1.019), (0.3, 4.4)  # the paper: 29 of 5,632 active, +1.9%
DENSE = (900.0, 4.0)


@pytest.mark.parametrize(
    ("written", "times_64", "nearer"), [(NEAR, FAR, "as written"), (FAR, NEAR, "64 times"), (NEAR, NEAR, "open")]
)
def test_the_reading_with_the_papers_numbers_is_nearer(tmp_path, written, times_64, nearer):
    line = table(tmp_path, trained("0.5b", 6e7, none=DENSE, l1_2e5=written, l1_128e5=times_64)).iloc[0]
    assert (line["nearer_active"], line["nearer_loss"]) == (nearer, nearer)
    assert line["as_written"].startswith("0.53% active, +1.9%" if written is NEAR else "0.0053% active, +10.0%")
    assert line["trained"].endswith("16% active without L1")


def test_a_value_that_was_not_trained_lies_between_its_neighbours(tmp_path):
    around = {"l1_1e3": (40.0, 4.06), "l1_2e3": (20.0, 4.1)}
    line = table(tmp_path, trained("0.5b", 6e7, none=DENSE, l1_1e4=(600.0, 4.0), **around)).iloc[0]
    assert line["times_64"].startswith("0.36 to 0.71% active, +1.5% to +2.5%")
    assert line["times_64"].endswith("(L1 1e-3 to 2e-3)")
    assert line["nearer_active"] == "64 times"
    wide = {"l1_1e3": (900.0, 4.0), "l1_2e3": (0.1, 4.1)}
    line = table(tmp_path, trained("0.5b", 6e7, none=DENSE, l1_1e4=(600.0, 4.0), **wide)).iloc[0]
    assert line["nearer_active"] == "open", "one end is nearer, the other is not"


def test_readings_around_the_same_value_say_nothing(tmp_path):
    assert table(tmp_path, trained("0.5b", 6e7, none=DENSE, l1_2e3=FAR)).empty


def test_what_one_reading_has_is_no_neighbour_of_the_other(tmp_path):
    line = table(tmp_path, trained("0.5b", 6e7, none=DENSE, l1_128e5=NEAR)).iloc[0]
    assert line["as_written"] == "16% active, 0.0%, 50% dead (L1 0)"
    assert line["nearer_active"] == "64 times"


def test_a_longer_training_gets_its_line_once_both_readings_are_there(tmp_path):
    short = trained("0.5b", 2e7, none=DENSE, l1_2e5=NEAR, l1_128e5=FAR)
    longer = {"none": DENSE, "l1_2e5": NEAR}
    assert len(table(tmp_path, short, trained("0.5b", 1.8e8, **longer))) == 1
    whole = table(tmp_path, short, trained("0.5b", 1.8e8, **longer, l1_128e5=FAR))
    assert [line.split(" (")[0] for line in whole["trained"]] == ["0.5b, 20M tokens", "0.5b, 180M tokens"]


def test_the_page_says_where_the_rows_point(tmp_path):
    one_way = trained("0.5b", 6e8, none=DENSE, l1_2e5=NEAR, l1_128e5=FAR)
    other = trained("1b", 6e7, none=DENSE, l1_2e5=FAR, l1_128e5=NEAR)
    both = "by active neurons {0}, by cross-entropy {0}".format
    enough = f"with at least 5 tokens per parameter, {both('as written in 1')}"
    fewer = f"with fewer tokens per parameter, {both('64 times in 1')}"
    for rows, words in ((one_way, enough), (other, fewer), (one_way + other, f"{enough}; {fewer}")):
        assert f"Nearer the paper: {words}." in l1_factor.section(results_of(tmp_path, rows))
    assert l1_factor.section(results_of(tmp_path, trained("0.5b", 6e7, none=DENSE))) == l1_factor.TEXT
