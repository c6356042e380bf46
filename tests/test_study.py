"""Studies: their files, the items made of them, and when an item was made from the configuration asked for."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.run.config import parse, save_config
from experiments.run.errors import ConfigError
from experiments.run.train_config import TrainConfig, with_values
from experiments.study.definition import check_name, check_path, load_study, study_graph, study_items, study_names
from experiments.study.programs import check_arguments, config_difference
from experiments.study.single import single_item


def config_in(root, *arguments):
    return load_study("smoke", [f"runs={root / 'runs'}", f"figures={root / 'figures'}", *arguments])


@pytest.mark.parametrize("name", study_names())
def test_every_study_is_valid(name, tmp_path):
    config = load_study(name, [f"runs={tmp_path}"])
    graph = study_graph(config)
    check_arguments(graph.items.values())
    trainings = {name: item for name, item in graph.items.items() if item.kind == "train"}
    wanted = {
        "six_runs": 6,
        "paper": 20,
        "l1_sweep": 96,
        "scaled": 24,
        "variants": 18,
        "sizes": 12,
        "demo": 9,
        "smoke": 7,
        "neurons": 3,
    }
    assert len(trainings) == wanted[name]
    assert all(f"run.study={name}" in item.arguments for item in trainings.values())


def test_a_grid_is_every_combination(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("grid:\n  model: [smoke, demo]\n  sparsity.l1: [0, 2e-5]\ntrainings:\n  silu: [model=smoke]\n")
    config = load_study(str(path))
    assert config.trainings == {
        "smoke_l1_0": ["model=smoke", "sparsity.l1=0"],
        "smoke_l1_2e-05": ["model=smoke", "sparsity.l1=2e-05"],
        "demo_l1_0": ["model=demo", "sparsity.l1=0"],
        "demo_l1_2e-05": ["model=demo", "sparsity.l1=2e-05"],
        "silu": ["model=smoke"],
    }
    assert config.name == "mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {}\n", "unknown option 'gird'.*did you mean 'grid'.*Valid are: "),
        ("trainings:\n  'a; rm -rf ~': [model=smoke]\n", "item 'a; rm -rf ~': names have letters, digits"),
        ("trainings:\n  ../up: [model=smoke]\n", "item '../up'"),
        ("trainings:\n  a: [model=smoke, sparsity.l2=1]\n", "a: unknown option 'sparsity.l2'"),
        ("kinds: [trian]\n", "kinds: kinds of items are train, nonzeros"),
        ("name: other\n", "the name of a study is that of its file"),
        ("grid: {training.seed: [1]}\ntrainings: {seed_1: [model=smoke]}\n", "seed_1: both in the grid and among"),
    ],
)
def test_a_wrong_study_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_arguments(study_graph(load_study(str(path))).items.values())


@pytest.mark.parametrize("name", ["", ".hidden", "-rf", "a b", "a/b", "a%j", "a\nb", "$(id)", "a'b", "ä"])
def test_names_that_mean_something_to_a_shell_are_refused(name):
    with pytest.raises(ConfigError, match="names have letters"):
        check_name(name, "item")


@pytest.mark.parametrize("path", ["/runs/%j", "/runs/a\nb", "/runs/\x07"])
def test_folders_that_slurm_would_misread_are_refused(path):
    with pytest.raises(ConfigError, match="must not hold %"):
        check_path(Path(path))


def test_single_items(tmp_path):
    study, item = single_item(
        "experiments.train", ["model=smoke", "run.study=mine", "run.item=one", f"run.dir={tmp_path}"]
    )
    assert (study, item.name, item.kind, item.folder) == ("mine", "one", "train", tmp_path)
    study, item = single_item("experiments.gather_nonzeros", ["checkpoint=x"])
    assert (study, item.name, item.kind) == ("local", "gather_nonzeros", "nonzeros")
    for module in ("experiments.trian", "experiments.study.graph", "slurm.cluster"):
        with pytest.raises(ConfigError, match=f"{module} cannot be launched"):
            single_item(module, [])
    for module in ("analysis.build", "experiments.run_notebooks", "experiments.bench_loop"):
        with pytest.raises(ConfigError, match="run it by hand"):
            single_item(module, [])
    with pytest.raises(ConfigError, match=r"did you mean 'sparsity.l1'"):
        single_item("experiments.train", ["l1=3"])


def test_an_evaluation_is_done_again_when_tasks_are_given(tmp_path):
    def evaluation(*arguments):
        return next(i for i in study_items(config_in(tmp_path, *arguments)) if i.name == "evaluate_relu")

    without, given = evaluation(), evaluation("tasks=folder")
    assert [e.may_miss for e in without.expected] == [False, True]
    assert [e.may_miss for e in given.expected] == [False, False]
    assert "tasks=folder" in given.arguments


def test_only_options_with_an_effect_make_another_configuration(tmp_path):
    item = next(i for i in study_items(config_in(tmp_path)) if i.name == "relu")
    saved = [*item.arguments, "run.log_every=7", "execution.micro_batch=2"]
    save_config(parse(TrainConfig, saved), item.folder / "config.yaml")
    assert config_difference(item) is None
    save_config(parse(TrainConfig, [*saved, "training.steps=3"]), item.folder / "config.yaml")
    assert config_difference(item) == "training.steps was 3, now 20"
    (item.folder / "config.yaml").write_text("an_option_of_old: 1\n")
    assert "another version" in config_difference(item)


def test_a_training_on_a_data_set_of_the_hub_can_be_done(tmp_path):
    """It is saved with the number of tokens that are read, which nobody asked for."""
    item = next(i for i in study_items(config_in(tmp_path, "data=hf:some/text")) if i.name == "relu")
    item = replace(item, arguments=(*item.arguments, "data.max_tokens=null"))
    asked = parse(TrainConfig, list(item.arguments))
    budget = asked.training.steps * asked.training.tokens_per_step
    save_config(with_values(asked, data={"max_tokens": budget}), item.folder / "config.yaml")
    assert config_difference(item) is None
    assert asked.data.max_tokens == budget


@pytest.mark.parametrize("name", ["smoke", "demo"])
def test_every_kind_of_item_has_an_expected_duration(name):
    config = load_study(name, ["tasks=folder", "data=stdlib"])
    assert {item.kind for item in study_items(config)} == set(config.seconds)


def test_kinds_of_items_and_benchmarks_one_by_one(tmp_path):
    chosen = study_items(config_in(tmp_path, "kinds=[train,bench_forward,build]", "bench_each=true"))
    names = {item.name: item for item in chosen}
    assert {item.kind for item in names.values()} == {"train", "bench_forward", "build"}
    assert names["bench_forward_silu"].needs == ("silu",)
    assert f"checkpoints=[{tmp_path / 'runs' / 'smoke' / 'silu'}]" in names["bench_forward_silu"].arguments
    assert set(names["build"].needs) == names.keys() - {"build"}
    together = next(item for item in study_items(config_in(tmp_path)) if item.kind == "bench_forward")
    assert len(together.needs) == len([item for item in names.values() if item.kind == "train"])
