"""`experiments.prepare_data` makes tokens once, before the training that reads them."""

import json
import re
import shutil

import pytest

from experiments import prepare_data, train
from experiments.data import batches
from experiments.run.config import parse
from experiments.run.errors import CheckpointError, DataError
from experiments.run.train_config import TrainConfig
from experiments.study.definition import prepared_texts
from experiments.study.graph import (
    Expected,
    Graph,
    Item,
    State,
    config_difference,
    config_of,
    entry_point,
    write_made_from,
)


def words(tmp_path):
    """Arguments of a training on a small text."""
    text = tmp_path / "text"
    if not text.is_dir():
        text.mkdir()
        for name, count in (("train-0.txt", 400), ("val.txt", 60)):
            lines = (f"{name[:3]} line {number} of {number * number} words\n" for number in range(count))
            (text / name).write_text("".join(lines))
    places = [f"data=path:{text}", f"data.cache_dir={tmp_path / 'cache'}"]
    return ["model=smoke", "training.steps=2", "run.progress=none", *places]


def config(tmp_path, *options):
    return parse(TrainConfig, [*words(tmp_path), f"run.dir={tmp_path / 'run'}", *options])


def test_a_training_finds_what_was_prepared(tmp_path, monkeypatch):
    prepare_data.main(config(tmp_path))
    monkeypatch.setattr(batches, "write_token_folder", None)  # it would be called
    prepare_data.main(config(tmp_path))
    train.main(config(tmp_path))


@pytest.mark.parametrize(("file", "split"), [("train-0", "training"), ("val", "held-out")])
def test_text_that_is_too_short_for_a_training_is_not_prepared(tmp_path, file, split):
    asked = config(tmp_path)
    (tmp_path / "text" / f"{file}.txt").write_text("abc")
    with pytest.raises(DataError, match=f"the {split} text has . tokens: too few for one sequence of"):
        prepare_data.main(asked)
    assert not (tmp_path / "run" / "text.json").exists()


@pytest.fixture
def study(tmp_path):
    """The graph of trainings with these seeds, and how to do one of its items as the launcher does."""

    def graph(*seeds):
        arguments = {f"seed_{seed}": [*words(tmp_path), f"training.seed={seed}"] for seed in seeds}
        texts = prepared_texts(arguments, "test", tmp_path / "runs")
        expected = (Expected((("op", "train"), ("metric", "cross_entropy"))),)
        trainings = [
            Item(
                name=name,
                kind="train",
                module="experiments.train",
                arguments=(*own, f"run.dir={tmp_path / 'runs' / name}"),
                folder=tmp_path / "runs" / name,
                needs=(texts[name].name,),
                expected=expected,
            )
            for name, own in arguments.items()
        ]
        return Graph([texts["seed_0"], *trainings], config_difference)

    def do(graph, item):
        made_from = {name: graph.items[name].digest() for name in item.needs}
        entry_point(item)[0](config_of(item))
        if made_from:
            write_made_from(item.folder, made_from)

    return graph, do


def test_prepared_text_is_done_while_its_tokens_are_there_and_its_text_is_the_same(tmp_path, study):
    make, do = study
    graph = make(0)
    text, training = graph.items.values()
    assert graph.problem(text) == f"no {text.files[0]}"
    for change, reason in (
        (lambda: None, None),
        (lambda: shutil.rmtree(tmp_path / "cache"), "no token files in"),
        (lambda: text.files[0].write_text("half"), "no .*text.json, or it is damaged"),
        (lambda: text.files[0].unlink(), "no .*text.json"),
        (
            lambda: (tmp_path / "text" / "val.txt").write_text("more " * 900),
            "the text has changed: it was path:.*train",
        ),
    ):
        do(graph, text)
        change()
        if reason is None:
            assert graph.problem(text) is None
            assert graph.states()[training.name] == (State.TODO, "not started")
        else:
            assert re.search(reason, graph.problem(text))
            assert graph.states()[training.name][0] is State.WAITS


def test_what_needs_tokens_no_more_is_done_without_them(tmp_path, study):
    make, do = study
    graph = make(0)
    text, training = graph.items.values()
    do(graph, text)
    do(graph, training)
    note = text.files[0].read_text()
    shutil.rmtree(tmp_path / "cache")
    assert {state for state, _ in graph.states().values()} == {State.DONE}
    assert "no token files in" in graph.problem(text)
    do(graph, text)
    assert text.files[0].read_text() == note, "its digest says what a training was made from"


@pytest.mark.parametrize("cache", ["kept", "purged"])
def test_trainings_of_one_study_are_of_one_text(tmp_path, study, cache):
    make, do = study
    graph = make(0)
    for item in graph.items.values():
        do(graph, item)
    if cache == "purged":
        shutil.rmtree(tmp_path / "cache")
    (tmp_path / "text" / "train-0.txt").write_text("another text\n" * 500)
    graph = make(0, 1)
    text, first, _ = graph.items.values()
    assert [state for state, _ in graph.states().values()] == [State.TODO, State.DONE, State.WAITS]
    with pytest.raises(DataError, match=r"text.json was made from other text .*so that the two do not mix"):
        do(graph, text)
    text.files[0].unlink()
    do(graph, text)
    assert graph.states()[first.name] == (State.TODO, f"made from another version of {text.name}")
    with pytest.raises(CheckpointError, match="was trained on other text"):
        do(graph, first)
    assert graph.states()[first.name] == (State.TODO, f"made from another version of {text.name}")


def test_other_options_in_the_same_folder_are_no_other_version_of_a_text(tmp_path):
    prepare_data.main(config(tmp_path))
    prepare_data.main(config(tmp_path, "data.max_tokens=1000"))
    assert json.loads((tmp_path / "run" / "text.json").read_text())["training_tokens"] == 1000


def test_a_newer_commit_after_the_cache_is_lost_is_refused(tmp_path, hub):
    prepared = config_of_the_hub(tmp_path)
    prepare_data.main(prepared)
    assert prepare_data.problem(prepared) is None
    (note,) = (tmp_path / "cache" / "commits").iterdir()
    note.unlink()
    assert "no commit of it is noted in" in prepare_data.problem(prepared)
    assert hub == [None]
    with pytest.raises(DataError, match=r"other text \(hf:.* at commit commit1, .* now \(hf:.* at commit commit2"):
        prepare_data.main(prepared)
    assert hub == [None, None]


def config_of_the_hub(tmp_path):
    (tmp_path / "set").mkdir()
    lines = (json.dumps({"text": f"{number} is the number {number}. " * 20}) for number in range(200))
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(lines))
    return config(tmp_path, f"data=hf:{tmp_path / 'set'}", "data.tokenizer=bpe", "data.validation_share=0.2")
