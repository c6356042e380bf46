"""Typed configuration: the command line, presets, errors that help, and the paper's table 2."""

import csv
import dataclasses
import importlib
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from experiments.run import config as config_module
from experiments.run.config import (
    describe,
    entry,
    load_config,
    option,
    parse,
    preset_names,
    save_config,
    section,
    to_dict,
)
from experiments.run.errors import ConfigError, DataError, Stopped
from experiments.run.train_config import (
    ModelConfig,
    TrainConfig,
    micro_batch_size,
    science,
    sequences_per_step,
    with_values,
)

TABLE_2 = Path(__file__).parent.parent / "analysis" / "reference" / "table2_hyperparameters.csv"


@dataclass
class Inner:
    """Inner."""

    names: list[str] = option([], "some names")
    sizes: list[int] = option([1, 2], "some sizes", unit="tokens")
    rates: list[float] = option([0.5], "some rates")
    label: str | None = option(None, "text or nothing")
    kind: str = option("a", "what kind")


@dataclass
class Outer:
    """Outer, for tests."""

    model: ModelConfig = section(ModelConfig, "the model", presets="model")
    inner: Inner = section(Inner, "the inner one", short="kind")
    scale: str = option("smoke", "name of a preset", presets="model")
    out: str = option("x", "a folder")


def test_command_line_of_the_issue():
    config = parse(TrainConfig, ["model=0.5b", "sparsity.l1=2e-5", "data=stdlib"])
    assert (config.model.name, config.sparsity.l1, config.data.source) == ("0.5b", 2e-5, "stdlib")


@pytest.mark.parametrize("text", ["2e-5", "2E-5", ".2e-4", "0.00002"])
def test_exponents_are_numbers(text, tmp_path):
    assert parse(TrainConfig, [f"sparsity.l1={text}"]).sparsity.l1 == pytest.approx(2e-5)
    (tmp_path / "c.yaml").write_text(f"sparsity:\n  l1: {text}\n")
    assert parse(TrainConfig, [f"config={tmp_path / 'c.yaml'}"]).sparsity.l1 == pytest.approx(2e-5)


def test_order_file_then_preset_then_single_keys(tmp_path):
    (tmp_path / "c.yaml").write_text("model:\n  layers: 7\n  hidden_size: 64\n")
    config = parse(TrainConfig, ["model.layers=3", "model=demo", f"config={tmp_path / 'c.yaml'}"])
    assert (config.model.layers, config.model.hidden_size, config.model.vocab_size) == (3, 64, 2048)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sparsity.l2=1", "did you mean 'sparsity.l1'"),
        ("l1=1", "did you mean 'sparsity.l1'"),
        ("training.learning_rate=1", "did you mean 'optimizer.learning_rate'"),
        ("model=0.6b", "did you mean '0.5b'"),
        ("sparsity.l1=abc", "sparsity.l1 must be a number, got 'abc' (str)"),
        ("sparsity.l1=true", "sparsity.l1 must be a number, got True (bool)"),
        ("training.steps=1e4", "training.steps must be an integer, got 10000.0 (float)"),
        ("training.steps=1.5", "must be an integer"),
        ("training.steps=null", "must be an integer, got None"),
        ("model.gated=maybe", "model.gated must be true or false, got 'maybe'"),
        ("sparsity.l1_reduction=max", "must be one of sum, mean, got 'max'"),
        ("execution.micro_batch=x", "must be an integer or null, got 'x'"),
        ("sparsity=3", "sparsity is a group of options"),
        ("--model=demo", "arguments are written key=value"),
        ("demo", "arguments are written key=value"),
        ("config=/nowhere.yaml", "no configuration file /nowhere.yaml"),
        ("model.name=[a", "cannot read the value '[a'"),
        ("data=files", "data.source must be stdlib, path:... or hf:..., got 'files'"),
        ("training.tokens_per_step=1000", "must be a multiple of training.sequence_length = 2048, got 1000"),
        ("model.attention_heads=3", "model.hidden_size must be a multiple of 2 * model.attention_heads = 6"),
        ("sparsity.l1=-1", "sparsity.l1 must not be negative, got -1"),
        ("run.max_steps=0", "run.max_steps must be at least 1, got 0"),
        ("training.sequence_length=4096", "must be at most model.max_positions = 2048, got 4096"),
    ],
)
def test_wrong_arguments_are_explained(argument, message):
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, [argument])
    assert message in str(caught.value)


def test_wrong_keys_in_files_name_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  layer: 7\n")
    with pytest.raises(ConfigError, match=r"unknown option 'model.layer' \(in .*c.yaml\); did you mean 'model.layers'"):
        load_config(TrainConfig, path)
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        load_config(TrainConfig, path)
    path.write_text("model: {a\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(TrainConfig, path)


def test_types_of_other_classes():
    config = parse(Outer, ["inner.names=[a,b]", "inner.sizes=[3]", "inner.rates=[1,2e-5]", "inner.label=x", "inner=z"])
    assert config.inner == Inner(["a", "b"], [3], [1.0, 2e-5], "x", "z")
    with pytest.raises(ConfigError, match=r"inner.sizes must be a list of integers, like \[a,b\], got 'x'"):
        parse(Outer, ["inner.sizes=x"])
    with pytest.raises(ConfigError, match=r"inner.sizes must be a list"):
        parse(Outer, ["inner.sizes=[1,x]"])


def test_defaults_are_not_shared():
    parse(Outer, []).inner.sizes.append(3)
    assert parse(Outer, []).inner.sizes == [1, 2]


def test_a_preset_of_a_plain_option_keeps_its_name_and_skips_foreign_sections():
    config = parse(Outer, ["scale=demo"])
    assert config.scale == "demo"
    assert config.model.name == "demo"


def test_saved_configuration_comes_back(tmp_path):
    config = parse(TrainConfig, ["model=1.5b-nongated", "sparsity.l1=1.5e-5", "run.dir=a b", "run.max_seconds=3"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config(TrainConfig, tmp_path / "config.yaml") == config


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(TrainConfig, ["model=demo", "--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert text == describe(TrainConfig) + "\n"
    for key in to_dict(TrainConfig()):
        assert f"  {key}=" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "sparsity.l1_off_steps=0" in text
    assert "(an integer, steps)" in text
    for name in preset_names("model"):
        assert name in text


def test_every_option_has_a_meaning():
    def check(cls):
        for field in dataclasses.fields(cls):
            assert field.metadata.get("help"), field.name
            if dataclasses.is_dataclass(field.default_factory):
                check(field.default_factory)

    check(TrainConfig)


# --- the paper's hyperparameters --------------------------------------------------------------------------------------

OF_TABLE_2 = {
    "hidden_size": "model.hidden_size",
    "intermediate_size": "model.intermediate_size",
    "activation": "model.activation",
    "attention_heads": "model.attention_heads",
    "key_value_heads": "model.key_value_heads",
    "initializer_range": "model.initializer_range",
    "rope_theta": "model.rope_theta",
    "tied_embeddings": "model.tied_embeddings",
    "vocab_size": "model.vocab_size",
    "dtype": "training.precision",
    "sequence_length": "training.sequence_length",
    "tokens_per_step": "training.tokens_per_step",
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "warmup_steps": "optimizer.warmup_steps",
    "max_grad_norm": "optimizer.max_grad_norm",
}
BY_SCALE = {"layers": "model.layers", "steps": "training.steps"}
# Not options: the head size follows from two others; the rest says which programs and which corpus the paper used.
NOT_OPTIONS = {"head_dim", "tokenizer", "dataset", "optimizer", "schedule"}


@pytest.mark.parametrize("column", ["gated", "non_gated"])
def test_presets_are_table_2(column):
    with TABLE_2.open() as file:
        table = {row["name"]: row[column] for row in csv.DictReader(file)}
    assert set(table) == set(OF_TABLE_2) | set(BY_SCALE) | NOT_OPTIONS
    for index, scale in enumerate(("0.5b", "1b", "1.5b", "2b")):
        name = scale if column == "gated" else f"{scale}-nongated"
        config = parse(TrainConfig, [f"model={name}"])
        values = to_dict(config)
        expected = {OF_TABLE_2[row]: table[row] for row in OF_TABLE_2}
        expected |= {BY_SCALE[row]: table[row].split("/")[index] for row in BY_SCALE}
        for key, text in expected.items():
            wanted = text == "true" if text in ("true", "false") else type(values[key])(text)
            assert values[key] == wanted, (name, key)
        assert config.model.hidden_size // config.model.attention_heads == int(table["head_dim"])
        assert (config.model.name, config.model.gated) == (name, column == "gated")


def test_the_default_is_the_smallest_scale_of_the_paper():
    assert parse(TrainConfig, []) == parse(TrainConfig, ["model=0.5b"])


@pytest.mark.parametrize("name", preset_names("model"))
def test_every_line_of_every_preset_is_used(name):
    config = parse(TrainConfig, [f"model={name}"])
    content = config_module._read_yaml(config_module.CONFIG_ROOT / "model" / f"{name}.yaml")
    flat = {".".join(keys): value for keys, value in config_module._leaves(content, TrainConfig, ())}
    assert {key: to_dict(config)[key] for key in flat} == flat
    assert config.model.name == name


# --- how a step is dealt out ------------------------------------------------------------------------------------------


def test_micro_batches():
    config = parse(TrainConfig, ["training.tokens_per_step=49152", "training.sequence_length=2048"])
    assert sequences_per_step(config) == 24
    assert [micro_batch_size(config, count) for count in (1, 2, 8)] == [8, 6, 3]
    for most, processes, taken in ((12, 2, 12), (5, 2, 4), (100, 2, 12), (16, 8, 3), (1, 8, 1)):
        limited = with_values(config, execution={"micro_batch": most})
        assert micro_batch_size(limited, processes) == taken, (most, processes)
    with pytest.raises(ConfigError, match=r"execution.micro_batch must be at least 1, got 0"):
        with_values(config, execution={"micro_batch": 0})
    with pytest.raises(ConfigError, match=r"24 sequences .* which 7 processes cannot share evenly"):
        micro_batch_size(config, 7)


def test_what_counts_as_science():
    config = parse(TrainConfig, ["model=smoke"])
    other = with_values(config, execution={"micro_batch": 1}, run={"log_every": 1}, data={"cache_dir": "elsewhere"})
    assert science(other) == science(config)
    for group, values in {"sparsity": {"l1": 1.0}, "training": {"seed": 9}, "data": {"text_field": "t"}}.items():
        assert science(with_values(config, **{group: values})) != science(config)


@pytest.mark.parametrize("name", ["backend", "capacity", "backup", "hot_neurons", "to_sparse_below", "to_dense_above"])
def test_options_that_have_moved_are_refused_with_their_new_place(name):
    with pytest.raises(ConfigError, match=rf"^sparsity.{name} has moved: it is execution.sparse.{name} now$"):
        parse(TrainConfig, [f"sparsity.{name}=1"])


def test_the_file_of_an_earlier_version_says_how_to_continue(tmp_path):
    config = parse(TrainConfig, ["model=smoke", "execution.sparse.backend=dense"])
    save_config(config, tmp_path / "config.yaml")
    content = yaml.safe_load((tmp_path / "config.yaml").read_text())
    content["sparsity"] |= content["execution"].pop("sparse")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    moved = "sparsity.backend to execution.sparse.backend, sparsity.backup to execution.sparse.backup"
    with pytest.raises(
        ConfigError, match=rf"config.yaml is of an earlier version.*{moved}.*Move these lines, or delete"
    ):
        load_config(TrainConfig, tmp_path / "config.yaml")
    for key in vars(config.execution.sparse):
        del content["sparsity"][key]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    assert science(load_config(TrainConfig, tmp_path / "config.yaml")) == science(config)


@pytest.mark.parametrize(
    ("values", "name"),
    [({}, "none"), ({"dead_neuron_reinit": True}, "dead_neuron_reinit"), ({"l1_ramp_steps": 5}, "l1_warmup")],
)
def test_modification(values, name):
    assert with_values(TrainConfig(), sparsity=values).modification == name


def test_reinitialisation_needs_relu():
    with pytest.raises(ConfigError, match=r"needs model.activation=relu"):
        parse(TrainConfig, ["model.activation=silu", "sparsity.dead_neuron_reinit=true"])


# --- entry point ------------------------------------------------------------------------------------------------------


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("main", "arguments", "code"),
    [
        (lambda config: None, [], 0),
        (lambda config: None, ["nonsense=1"], 2),
        (lambda config: _raise(DataError("no text")), [], 1),
        (lambda config: _raise(Stopped("by a signal")), [], 85),
    ],
)
def test_exit_codes(main, arguments, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as caught:
        entry(main, TrainConfig)
    assert caught.value.code == code


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        entry(lambda config: 1 / 0, TrainConfig, [])


@pytest.mark.parametrize(
    "module", ["train", "gather_nonzeros", "bench_kernels", "bench_forward", "bench_training", "bench_loop", "evaluate"]
)
def test_every_program_explains_its_options(module):
    main = importlib.import_module(f"experiments.{module}").main
    config = next(iter(typing.get_type_hints(main).values()))
    text = describe(config)
    for field in dataclasses.fields(config):
        assert field.name in text
    single = [
        line.split("=")[0].strip() for line in text.splitlines() if re.match(r"  [a-z0-9_.]+=(?!NAME|VALUE)", line)
    ]
    for group in {key.partition(".")[0] for key in single}:
        depths = [key.count(".") for key in single if key.startswith(f"{group}.")]
        assert depths == sorted(depths), "an option after a section would be taken for one of the section"
    assert not any("." not in key for key in single[sum("." not in key for key in single) :]), "top-level options first"
