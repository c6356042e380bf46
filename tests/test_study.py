"""Studies: their files, their items, and whether an item was made from the requested configuration."""

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import with_values

from experiments.run.config import parse, save_config, yaml_names
from experiments.run.errors import ConfigError
from experiments.run.train_config import TrainConfig
from experiments.study.definition import (
    STUDIES,
    check_name,
    check_path,
    command_items,
    load_study,
    study_graph,
    study_items,
)
from experiments.study.graph import config_difference, config_of
from slurm.submit import read_request


def config_in(root, *arguments):
    return load_study("smoke", [f"runs={root / 'runs'}", *arguments])


def config_of_file(root, content, *arguments):
    (root / "mine.yaml").write_text(content)
    return load_study(str(root / "mine.yaml"), arguments)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.slow) if one == "l1_sweep" else one for one in yaml_names(STUDIES)]
)
def test_every_study_is_valid(name, tmp_path):
    config = load_study(name, [f"runs={tmp_path}"])
    graph = study_graph(config)
    if not config.parts:  # which are studies of their own
        assert all(config_of(item) is not None or item.kind == "build" for item in graph.items.values())
    trainings = [item for item in graph.items.values() if item.kind == "train"]
    assert all(graph.items[need].kind == "prepare_data" for item in trainings for need in item.needs)
    assert all(f"run.study={name}" in item.arguments for item in trainings)


def test_models_that_were_trained_elsewhere_are_measured_alike(tmp_path):
    config = load_study("released", [f"runs={tmp_path}", "data=path:/text", "tasks=/tasks"])
    items = study_graph(config).items
    kinds = ("nonzeros", "evaluate", "bench_forward")
    assert set(items) == {*(f"{kind}_SparseLM{size}B" for kind in kinds for size in ("0.5", "1", "1.5", "2")), "build"}
    for name, item in items.items():
        if name.endswith("SparseLM2B"):
            assert not item.needs
            assert {"data=path:/text"} < set(item.arguments)
            assert any("checkpoint" in argument and "SakanaAI/SparseLM2B" in argument for argument in item.arguments)


def test_a_grid_is_every_combination(tmp_path):
    text = "grid:\n  model: [smoke, demo]\n  sparsity.l1: [0, 2e-5]\ntrainings:\n  silu: [model=smoke]\n"
    config = config_of_file(tmp_path, text)
    assert config.trainings == {
        "smoke_l1_0": ["model=smoke", "sparsity.l1=0"],
        "smoke_l1_2e-05": ["model=smoke", "sparsity.l1=2e-5"],
        "demo_l1_0": ["model=demo", "sparsity.l1=0"],
        "demo_l1_2e-05": ["model=demo", "sparsity.l1=2e-5"],
        "silu": ["model=smoke"],
    }
    assert config.name == "mine"


@pytest.mark.parametrize("name", ["", ".hidden", "-rf", "a b", "a/b", "a%j", "a\nb", "$(id)", "a'b", "ä"])
def test_names_that_mean_something_to_a_shell_are_refused(name):
    with pytest.raises(ConfigError, match="a name must be of at most 200 letters"):
        check_name(name, "item")


@pytest.mark.parametrize("path", ["/runs/%j", "/runs/a\nb", "/runs/\x07"])
def test_folders_that_slurm_would_misread_are_refused(path):
    with pytest.raises(ConfigError, match="must not contain %"):
        check_path(Path(path))


def test_one_command_is_a_training_and_its_text(tmp_path):
    place = ["run.study=mine", "run.item=one", f"run.dir={tmp_path / 'x'}"]
    study, folder, (text, item), configs = command_items("experiments.train", ["model=smoke", *place])
    assert configs["one"].run.folder == item.folder
    assert (study, item.name, item.kind, item.folder) == ("mine", "one", "train", tmp_path / "x")
    assert item.needs == (text.name,)
    assert (text.kind, text.folder) == ("prepare_data", tmp_path / text.name)
    assert folder == tmp_path
    study, folder, (item,), _ = command_items("experiments.gather_nonzeros", ["checkpoint=x"])
    assert (study, item.name, item.kind) == ("local", "gather_nonzeros", "nonzeros")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("experiments.trian", r"experiments.trian cannot be launched: .*; did you mean 'experiments\.train'\?"),
        ("slurm.cluster", "slurm.cluster cannot be launched"),
        ("analysis.build", "takes no typed configuration: run it by hand"),
        ("experiments.run_notebooks", "leaves no result rows that would tell when it is done: run it by hand"),
        ("./train", r"a module is wanted, such as experiments\.train"),
        ("", r"a module is wanted, such as experiments\.train"),
    ],
)
def test_a_wrong_command_is_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        command_items(module, [])


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("tokens=[1,2]", [[1, 2]]),
        ("tokens=[1,2],[3]", [[1, 2], [3]]),
        ("masks=a\\,b", ["a,b"]),
    ],
)
def test_commas_separate_values(text, values):
    _, _, items, configs = command_items("experiments.bench_kernels", [text])
    assert [getattr(configs[item.name], text.partition("=")[0]) for item in items] == values


def test_several_values_are_several_runs_named_by_what_differs(tmp_path):
    swept = ["model=smoke", "training.seed=0,1", "sparsity.l1=0,2e-5"]
    _, folder, items, _ = command_items("experiments.train", swept)
    assert [item.name for item in items[1:]] == ["seed_0_l1_0", "seed_0_l1_2e-05", "seed_1_l1_0", "seed_1_l1_2e-05"]
    assert (items[0].kind, folder) == ("prepare_data", Path("runs/local")), "all of them read the same text"
    assert items[4].folder == folder / "seed_1_l1_2e-05"
    config = parse(TrainConfig, list(items[4].arguments))
    assert (config.training.seed, config.sparsity.l1, config.run.folder) == (1, 2e-5, items[4].folder)
    _, folder, items, _ = command_items("experiments.train", ["model=smoke,demo", f"run.dir={tmp_path}", "run.item=a"])
    assert [item.name for item in items if item.kind == "train"] == ["a_smoke", "a_demo"]
    assert folder == tmp_path
    assert len(items) == 4, "each vocabulary has a text of its own"
    _, _, items, _ = command_items("experiments.gather_nonzeros", ["checkpoint=runs/a,runs/b"])
    assert [item.name for item in items] == [f"gather_nonzeros_checkpoint_runs-{name}" for name in "ab"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["training.seed=0,0"], "training.seed must be given values that differ, got '0,0'"),
        (["training.seed=0,"], "training.seed must be given values that differ"),
        (["training.seed=0,1", "run.item=a,b"], "run.item: give one name"),
        (["training.seed=0,x"], "training.seed must be an integer, got 'x'"),
        (["data=path:/a,b"], r"must be stdlib, path:... or hf:..., got 'b' \(.*a comma within a value is written \\,"),
        (["data=path:/a b,path:/a-b"], "two of the runs would be called data_path-a-b"),
    ],
)
def test_a_wrong_sweep_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        command_items("experiments.train", ["model=smoke", *arguments])


def test_a_text_is_prepared_once_for_all_trainings_that_read_it(tmp_path):
    items = list(study_items(config_in(tmp_path)))
    (text,) = [item for item in items if item.kind == "prepare_data"]
    assert {item.needs for item in items if item.kind == "train"} == {(text.name,)}
    assert text.files == (tmp_path / "runs" / "smoke" / text.name / "text.json",)
    asked, needed = (parse(TrainConfig, list(item.arguments)) for item in (text, items[1]))
    assert (asked.data, asked.model.vocab_size) == (needed.data, needed.model.vocab_size)
    assert f"run.dir={text.folder}" in text.arguments
    other = next(study_items(config_in(tmp_path, "data=path:/elsewhere")))
    assert (other.kind, other.name) != (text.kind, text.name)


def test_a_study_of_parts_has_their_items_in_its_own_folder(tmp_path):
    text = "parts: [smoke, six_runs]\nkinds: [train, nonzeros, evaluate, build]\n"
    text += "trainings: {extra: [model=smoke, training.seed=7]}\n"
    graph = study_graph(config_of_file(tmp_path, text, f"runs={tmp_path / 'runs'}", "data=path:/text"))
    assert all(config_of(item) is not None or item.kind == "build" for item in graph.items.values())
    kinds = [item.kind for item in graph.items.values()]
    assert (kinds.count("train"), kinds.count("build"), kinds.count("prepare_data")) == (5 + 6 + 1, 1, 1)
    assert all("data=path:/text" in item.arguments for item in graph.items.values() if item.kind == "train")
    assert {item.folder.parent for item in graph.items.values()} == {tmp_path / "runs" / "mine"}
    assert set(graph.items["build"].needs) == graph.items.keys() - {"build"}
    assert "groups=[4,8,16]" in graph.items["nonzeros_smoke_l1_0_seed_0"].arguments, "a part keeps its arguments"


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("gird: {}\n", "; did you mean 'grid'?; --help lists all options. Valid are: "),
        ("trainings: {'a; rm -rf ~': [model=smoke]}\n", "item 'a; rm -rf ~': a name must be of at most 200 letters"),
        ("trainings: {a: [model=smoke, sparsity.l2=1]}\n", "a: unknown option 'sparsity.l2'"),
        ("kinds: [trian]\n", "kinds: kinds of items are prepare_data, train, nonzeros"),
        ("name: other\n", "unknown option 'name'"),
        ("grid: {training.seed: [1]}\ntrainings: {seed_1: [model=smoke]}\n", "seed_1: both in the grid and among"),
        ("trainings: {one: [training.seed=5]}\ncheckpoints: {one: models/one}\n", "one: both among the checkpoints"),
        ("parts: [seven]\n", "study=seven: there is none"),
        ("parts: [gpu]\n", "parts: gpu has parts itself"),
        ("parts: [smoke]\ntrainings: {relu: [model=smoke, training.seed=7]}\n", "item relu is there twice"),
        ("trainings: {build: [model=smoke]}\n", "item build is there twice"),
        (
            "grid: {model.layers: [2, 3]}\narguments: {train: [model=smoke]}\n",
            "layers_2 and layers_3: tables would take both for one model, 'smoke', but model.layers is 2 and 3: give",
        ),
        ("trainings: {a: [model=demo], b: [model=smoke, model.name=demo]}\n", "a and b: tables would take both for"),
        ("parts: [smoke]\ntrainings: {wide: [model=smoke, model.intermediate_size=64]}\n", "silu and wide: tables"),
        ("grid: {training.seed: []}\n", "grid: training.seed must have values that differ"),
        ("grid: {training.seed: [1, 1]}\n", "grid: training.seed must have values that differ"),
        ("runs: ''\n", "runs must name a folder"),
        (
            "runs: ~/mine\nkinds: [build]\n",
            "a folder of runs must not contain %, /~, control characters or line breaks",
        ),
        ("benchmarks: {few: [--tokens]}\n", "benchmarks: few: arguments are written option=value, got '--tokens'"),
        ("benchmarks: {few: [train, model=smoke]}\n", "got 'train'; the first word may be one of bench_kernels, b"),
        ("benchmarks: {few: [model=smoke, bench_training]}\n", "option=value, got 'bench_training'; the first word"),
        ("3", ""),
        ("\0", ""),
        ("{", ""),
        (b"\xff\xfe\x00", ""),
        ("grid: [1]\n", "grid"),
        ("grid: {model: smoke}\n", "grid"),
        ("grid: {'a b': [1]}\n", "a b_1"),
        ("trainings: {a: [nope]}\n", "trainings: a: arguments are written option=value, got 'nope'"),
        ("trainings: {a: [--help]}\n", "trainings: a: arguments are written option=value, got '--help'"),
        ("trainings: {a: [model=nope]}\n", "a: model=nope: there is no"),
        ("arguments: {train: ['']}\n", "arguments: train: "),
        ("seconds: {train: .nan}\n", "must be a mapping, each value a number, got"),
        ("seconds: {train: soon}\n", "seconds"),
        ("only: [a]\n", "no item a; there are "),
    ],
)
def test_whatever_is_wrong_with_a_study_is_one_line_with_its_file_and_key(tmp_path, content, key):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        read_request([f"study={path}", "--dry-run"])
    text = str(caught.value)
    assert text.startswith(f"study={path}: ")
    assert key in text
    assert "\n" not in text


def test_an_evaluation_is_done_again_when_tasks_are_given(tmp_path):
    def evaluation(*arguments):
        return next(i for i in study_items(config_in(tmp_path, *arguments)) if i.name == "evaluate_relu")

    without, given = evaluation(), evaluation("tasks=folder")
    assert [e.may_miss for e in without.expected] == [False, True]
    assert [e.may_miss for e in given.expected] == [False, False]
    assert "tasks=folder" in given.arguments


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("smoke", {("ffn_forward", "time"), ("ffn_training", "time")}),
        ("full_shapes", {("ceiling_copy", "bandwidth"), ("ceiling_matmul", "rate"), ("ceiling_gather", "bandwidth")}),
    ],
)
def test_of_kernels_the_operations_that_a_study_names_are_expected(name, wanted):
    item = next(i for i in study_items(load_study(name, ["data=stdlib"])) if i.name == "bench_kernels")
    assert {tuple(value for _, value in one.columns) for one in item.expected} == wanted


def test_a_study_may_have_several_benchmarks_of_kernels(tmp_path):
    text = "benchmarks:\n  few: ['ops=[ffn_forward_graph, down]', 'tokens=[1]']\n  many: ['tokens=[4096]']\n"
    text += "kinds: [bench_kernels]\narguments: {bench_kernels: ['ops=[ffn_training]', hidden=64]}\n"
    few, many = study_items(config_of_file(tmp_path, text))
    assert (few.name, few.kind, few.module) == ("few", "bench_kernels", "experiments.bench_kernels")
    assert few.arguments[:4] == ("ops=[ffn_training]", "hidden=64", "ops=[ffn_forward_graph, down]", "tokens=[1]")
    assert "run.item=few" in few.arguments, "its own arguments come last"
    wanted = [[("ffn_forward_graph", "time"), ("down", "time")], [("ffn_training", "time")]]
    assert [[tuple(v for _, v in one.columns) for one in item.expected] for item in (few, many)] == wanted


def test_a_benchmark_of_a_whole_model_may_need_no_training(tmp_path):
    text = "benchmarks:\n  models: [bench_training, model=smoke]\n  one: ['tokens=[1]']\n"
    text += "arguments: {bench_training: [micro_batch=2, model=demo], bench_kernels: [hidden=64]}\n"
    text += "kinds: [bench_kernels, bench_training]\n"
    models, one = study_items(config_of_file(tmp_path, text))
    assert (models.name, models.kind, models.module) == ("models", "bench_training", "experiments.bench_training")
    assert models.arguments[:3] == ("micro_batch=2", "model=demo", "model=smoke"), "its own arguments come last"
    assert models.needs == ()
    wanted = [("model_training", "throughput"), ("model_training", "peak_memory")]
    assert [tuple(value for _, value in one.columns) for one in models.expected] == wanted
    assert (one.name, one.kind, one.arguments[:2]) == ("one", "bench_kernels", ("hidden=64", "tokens=[1]"))


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
    assert {item.kind for item in names.values()} == {"prepare_data", "train", "bench_forward", "build"}
    assert names["bench_forward_silu"].needs == ("silu",)
    assert f"checkpoints=[{tmp_path / 'runs' / 'smoke' / 'silu'}]" in names["bench_forward_silu"].arguments
    assert set(names["build"].needs) == names.keys() - {"build"}
    together = next(item for item in study_items(config_in(tmp_path)) if item.kind == "bench_forward")
    assert len(together.needs) == len([item for item in names.values() if item.kind == "train"])
