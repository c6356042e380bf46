"""When an item counts as done."""

from dataclasses import replace

import pytest

from experiments.run.results import make_row, read_rows, write_rows
from experiments.study.graph import MADE_FROM, Expected, Graph, Item, State, write_made_from


def item(folder, name, needs=(), **fields):
    expected = (Expected((("op", "train"), ("metric", "cross_entropy"))),)
    return Item(name, "train", "experiments.train", ("model=demo",), folder / name, tuple(needs), expected, **fields)


def leave_rows(item, value=4.0, date="2026-01-01T00:00:00+00:00", **fields):
    values = {"value": value} if value is not None else {}
    write_rows(item.rows_path, [make_row(op="train", metric="cross_entropy", date=date, **values, **fields)])


@pytest.fixture
def first(tmp_path):
    return item(tmp_path, "first")


@pytest.fixture
def pair(first, tmp_path):
    return first, item(tmp_path, "second", needs=["first"])


def states(*items, **options):
    return {name: state for name, (state, _) in Graph(items, **options).states().items()}


def test_items_become_ready_in_order(pair):
    first, second = pair
    assert states(*pair) == {"first": State.TODO, "second": State.WAITS}
    leave_rows(first)
    assert states(*pair) == {"first": State.DONE, "second": State.TODO}
    leave_rows(second)
    assert states(*pair) == {"first": State.DONE, "second": State.DONE}


def test_a_row_without_a_value_needs_its_reason(first):
    leave_rows(first, value=None, missing="no NVML on this device")
    assert Graph([first]).problem(first) is None
    required = replace(first, expected=(Expected((("metric", "cross_entropy"),), may_miss=False),))
    assert "no NVML" in Graph([required]).problem(required)
    text = first.rows_path.read_text().replace("no NVML on this device", "")
    first.rows_path.write_text(text)
    assert read_rows(first.rows_path)[0]["missing"] is None
    assert "neither a finite value nor a reason" in Graph([first]).problem(first)


def test_a_number_that_is_not_finite_is_not_done(first):
    leave_rows(first)
    first.rows_path.write_text(first.rows_path.read_text().replace(",4.0,", ",nan,"))
    assert "neither a finite value" in Graph([first]).problem(first)


def test_an_expected_row_must_be_there(first):
    leave_rows(first)
    wider = replace(first, expected=(*first.expected, Expected((("op", "train"), ("metric", "nonzeros")))))
    assert Graph([wider]).problem(wider) == "no row with op=train, metric=nonzeros"


def test_an_item_older_than_what_it_was_made_from_is_done_again(pair):
    first, second = pair
    leave_rows(second, date="2026-01-01T00:00:00+00:00")
    leave_rows(first, date="2026-01-01T00:00:01+00:00")
    assert Graph(pair).states()["second"] == (State.TODO, "older than first")


def test_what_an_item_was_made_from_is_told_by_content_whatever_the_dates_say(pair):
    first, second = pair
    leave_rows(first, date="2999-01-01T00:00:00+00:00")
    leave_rows(second, date="2026-01-01T00:00:00+00:00")
    write_made_from(second.folder, {"first": first.digest()})
    assert Graph(pair).states()["second"] == (State.DONE, "")
    leave_rows(first, value=4.5, date="2001-01-01T00:00:00+00:00")
    assert Graph(pair).states()["second"] == (State.TODO, "made from another version of first")
    (second.folder / MADE_FROM).write_text("{")
    assert Graph(pair).states()["second"] == (State.DONE, ""), "a damaged record is none"


def test_transient_results_may_be_missing_afterwards(first, tmp_path):
    text = Item("text", "prepare_data", "", (), tmp_path / "text", files=(tmp_path / "text.json",), transient=True)
    first = replace(first, needs=("text",))
    assert states(text, first) == {"text": State.TODO, "first": State.WAITS}
    text.files[0].write_text("tokens")
    leave_rows(first)
    write_made_from(first.folder, {"text": text.digest()})
    assert states(text, first) == {"text": State.DONE, "first": State.DONE}
    text.files[0].unlink()
    assert states(text, first) == {"text": State.DONE, "first": State.DONE}
    text.files[0].write_text("other tokens")
    assert states(text, first)["first"] is State.TODO
    text.files[0].unlink()
    first.rows_path.unlink()
    assert states(text, first) == {"text": State.TODO, "first": State.WAITS}


def test_files_must_be_there_and_their_content_counts(tmp_path):
    page = Item("page", "page", "", (), tmp_path / "page", files=(tmp_path / "index.html",))
    copy = Item("copy", "page", "", (), tmp_path / "copy", ("page",), files=(tmp_path / "copy.html",))
    assert page.digest() == ""
    assert states(page, copy) == {"page": State.TODO, "copy": State.WAITS}
    for path in (*page.files, *copy.files):
        path.write_text("page")
    write_made_from(copy.folder, {"page": page.digest()})
    assert states(page, copy)["copy"] is State.DONE
    page.files[0].write_text("another page")
    assert states(page, copy)["copy"] is State.TODO


def test_another_configuration_is_not_done(first):
    leave_rows(first)
    graph = Graph([first], same_config=lambda item: "training.steps is 300 there, 400 asked for")
    assert graph.states()["first"] == (State.TODO, "training.steps is 300 there, 400 asked for")


def test_select_takes_what_the_named_items_need(pair, tmp_path):
    graph = Graph([*pair, item(tmp_path, "third")])
    assert list(graph.select(["second"]).items) == ["first", "second"]
    with pytest.raises(ValueError, match="fourth"):
        graph.select(["fourth"])


def test_a_need_must_come_before(pair):
    with pytest.raises(ValueError, match="first"):
        Graph(reversed(pair))
    with pytest.raises(ValueError, match="twice"):
        Graph([pair[0], pair[0]])


def test_a_damaged_file_is_named(first):
    leave_rows(first)
    first.rows_path.write_text(first.rows_path.read_text()[:-1])
    assert "damaged: " in Graph([first]).problem(first)
    assert "half-written" in Graph([first]).states()["first"][1]


def test_looking_at_all_items_reads_each_file_once(pair, monkeypatch):
    for one in pair:
        leave_rows(one)
    paths = []
    monkeypatch.setattr("experiments.study.graph.read_rows", lambda path: paths.append(path) or read_rows(path))
    graph = Graph(pair)
    assert {state for state, _ in graph.states().values()} == {State.DONE}
    assert sorted(paths) == sorted(one.rows_path for one in pair)
    graph.states()
    assert len(paths) == 4, "and again the next time: nothing is remembered"


def test_a_command_can_be_pasted_into_a_shell(tmp_path):
    one = replace(item(tmp_path, "a"), arguments=("tokens=[1,2]", "data=path:/with space"))
    assert one.command() == "python -m experiments.train 'tokens=[1,2]' 'data=path:/with space'"
