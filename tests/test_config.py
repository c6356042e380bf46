"""Typed configuration: the command line, presets, errors that help, and the paper's table 2."""

import csv
import importlib
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_run import with_values

from analysis.schema import MODIFICATIONS
from experiments.run.config import (
    CONFIG_ROOT,
    describe,
    entry,
    load_config,
    option,
    parse,
    save_config,
    section,
    to_dict,
    yaml_names,
)
from experiments.run.errors import ConfigError, DataError, Stopped
from experiments.run.train_config import (
    ModelConfig,
    TrainConfig,
    micro_batch_size,
    science,
    sequences_per_step,
    training_columns,
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
    out: str = option("x", "a folder")


@pytest.mark.parametrize("text", ["2e-5", "2E-5", ".2e-4", "0.00002"])
def test_exponents_are_numbers(text, tmp_path):
    (tmp_path / "c.yaml").write_text(f"sparsity:\n  l1: {text}\n")
    for argument in (f"sparsity.l1={text}", f"config={tmp_path / 'c.yaml'}"):
        assert parse(TrainConfig, [argument]).sparsity.l1 == pytest.approx(2e-5)


def test_order_file_then_preset_then_single_keys(tmp_path):
    (tmp_path / "c.yaml").write_text("model:\n  layers: 7\n  hidden_size: 64\n")
    config = parse(TrainConfig, ["model.layers=3", "model=demo", f"config={tmp_path / 'c.yaml'}"])
    assert (config.model.layers, config.model.hidden_size, config.model.vocab_size) == (3, 64, 257)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("sparsity.l2=1", "did you mean 'sparsity.l1'"),
        ("sparsity.backend=dense", "did you mean 'execution.sparse.backend'"),
        ("l1=1", "did you mean 'sparsity.l1'"),
        ("training.learning_rate=1", "did you mean 'optimizer.learning_rate'"),
        ("model=0.6b", "did you mean '0.5b'"),
        ("sparsity.l1=abc", "sparsity.l1 must be a number, got 'abc'"),
        ("sparsity.l1=true", "sparsity.l1 must be a number, got 'true'"),
        ("training.steps=1e4", "training.steps must be an integer, got '1e4'"),
        ("training.steps=null", "must be an integer, got 'null'"),
        ("model.gated=maybe", "model.gated must be true or false, got 'maybe'"),
        ("model.activation=gelu", "must be one of relu, relu2, silu, got 'gelu'"),
        ("execution.micro_batch=x", "must be an integer or null, got 'x'"),
        ("sparsity=3", "sparsity is a group of options"),
        ("--model=demo", "arguments are written key=value"),
        ("demo", "arguments are written key=value"),
        ("config=/nowhere.yaml", "/nowhere.yaml cannot be read: No such file"),
        ("config=", ". cannot be read: Is a directory"),
        ("data=files", "data.source must be stdlib, path:... or hf:..., got 'files'"),
        ("training.tokens_per_step=1000", "must be a multiple of training.sequence_length = 2048, got 1000"),
        ("model.attention_heads=3", "model.hidden_size must be a multiple of 2 * model.attention_heads = 6"),
        ("sparsity.exempt=0.125", "sparsity.exempt=0.125 needs sparsity.l1 > 0: no neuron pays L1 without it"),
        ("training.sequence_length=4096", "must be at most model.max_positions = 2048, got 4096"),
    ],
)
def test_wrong_arguments_are_explained(argument, message):
    with pytest.raises(ConfigError) as caught:
        parse(TrainConfig, [argument])
    assert message in str(caught.value)


def test_types_of_other_classes():
    config = parse(Outer, ["inner.names=[a,b]", "inner.sizes=[3]", "inner.rates=[1,2e-5]", "inner.label=x", "inner=z"])
    assert config.inner == Inner(["a", "b"], [3], [1.0, 2e-5], "x", "z")
    for wrong in ("x", "[1,x]"):
        with pytest.raises(ConfigError, match=r"inner.sizes must be a list of integers, like \[a,b\], got"):
            parse(Outer, [f"inner.sizes={wrong}"])


@pytest.mark.parametrize(
    "text",
    ["a #2", "3.10", "yes", "12:30", "null", "~", "", "[a]", "{a: b}", "'a'", " a ", "???", "${oc.env:X}", "${", "é\n"],
)
def test_text_is_taken_as_typed_and_saved_as_it_is(text, tmp_path):
    config = parse(Outer, [f"inner.kind={text}"])
    assert config.inner.kind == text
    save_config(config, tmp_path / "c.yaml")
    assert load_config(Outer, tmp_path / "c.yaml") == config


def test_plain_words_in_a_file_are_text_to_an_option_that_takes_text(tmp_path):
    (tmp_path / "c.yaml").write_text("inner: {kind: 3.10, names: [yes, 12:30, 1e-5], label: 010}\nout: no\n")
    config = load_config(Outer, tmp_path / "c.yaml")
    assert (config.inner.kind, config.inner.names, config.inner.label) == ("3.10", ["yes", "12:30", "1e-5"], "010")
    assert config.out == "no"


def test_nothing_in_a_value_is_resolved(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", "xyzzy")
    there = "${oc.env:A_SECRET}"
    (tmp_path / "c.yaml").write_text(f"inner: {{kind: '{there}', names: ['{there}']}}\n")
    for arguments in ([f"config={tmp_path / 'c.yaml'}"], [f"inner.kind={there}", f"inner.names=['{there}']"]):
        config = parse(Outer, arguments)
        assert (config.inner.kind, config.inner.names) == (there, [there])
        save_config(config, tmp_path / "saved.yaml")
        assert "xyzzy" not in (tmp_path / "saved.yaml").read_text()
    with pytest.raises(ConfigError, match=r"sparsity.l1 must be a number, got '\$\{oc.env:A_SECRET\}'"):
        parse(TrainConfig, [f"sparsity.l1={there}"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"inner: {kinds: 7}", r"unknown option 'inner.kinds' \(in .*c.yaml\); did you mean 'inner.kind'"),
        (b"inner: {sizes: [9.5]}", r"inner.sizes \(in .*c.yaml\) must be a list of integers, like \[a,b\], got"),
        (b"- 1", "must hold a mapping"),
        (b"inner: {a", "cannot be read"),
        (b"inner: {kind: a, kind: b}", "'kind' comes twice"),
        (b"\xff\xfe\xff", "cannot be read"),
        (b"inner: !!python/object/apply:os.getpid []", "could not determine a constructor"),
        (b"[" * 5000, "it is nested too deeply"),
        (b"inner: {sizes: !!int x}", "cannot be read"),
        (b'inner: {kind: "a\\0b"}', "inner.kind .* must be text.*no text here has a NUL"),
        (b'inner: {kind: "\\ud800"}', "not valid Unicode"),
        (b"inner: {sizes: [99999999999999999999]}", "each of inner.sizes .* must be an integer of 64 bits"),
        (b"inner: {kind: null}", "inner.kind .* must be text, got null"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nout: [*b, *b]", "unknown option 'a'"),
    ],
)
def test_hostile_files_are_refused_in_one_line(content, message, tmp_path):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(Outer, tmp_path / "c.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "argument", ["config=" + "a" * 5000, "config=/dev/null/x", "config=\ud800", "inner.sizes=[[1]"]
)
def test_arguments_that_name_no_file_or_list_are_refused_in_one_line(argument):
    with pytest.raises(ConfigError) as caught:
        parse(Outer, [argument])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_defaults_are_not_shared():
    parse(Outer, []).inner.sizes.append(3)
    assert parse(Outer, []).inner.sizes == [1, 2]


def test_help_is_the_description_of_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(TrainConfig, ["model=demo", "--help"])
    text = capsys.readouterr().out
    assert (caught.value.code, text) == (0, describe(TrainConfig) + "\n")
    assert "sparsity.l1_off_steps=0" in text
    assert "(an integer, steps, at least 0)" in text
    assert max(map(len, text.splitlines())) <= 120


# --- the paper's hyperparameters --------------------------------------------------------------------------------------

# Its rows are called as the last parts of our options are, but for these.
OF_TABLE_2 = {key.rpartition(".")[2]: key for key in to_dict(TrainConfig())}
OF_TABLE_2 |= {"dtype": "training.precision", "adam_eps": "optimizer.eps"}
OF_TABLE_2 |= {"adam_beta1": "optimizer.beta1", "adam_beta2": "optimizer.beta2"}
BY_SCALE = {"layers", "steps"}
# Not options: the head size follows from two others; the rest says which programs and which corpus the paper used.
NOT_OPTIONS = {"head_dim", "tokenizer", "dataset", "optimizer", "schedule"}


@pytest.mark.parametrize("column", ["gated", "non_gated"])
def test_presets_are_table_2(column):
    with TABLE_2.open() as file:
        table = {row["name"]: row[column] for row in csv.DictReader(file)}
    assert set(table) > BY_SCALE | NOT_OPTIONS
    for index, scale in enumerate(("0.5b", "1b", "1.5b", "2b")):
        name = scale if column == "gated" else f"{scale}-nongated"
        config = parse(TrainConfig, [f"model={name}"])
        values = to_dict(config)
        for row in table.keys() - NOT_OPTIONS:
            text, found = table[row].split("/")[index] if row in BY_SCALE else table[row], values[OF_TABLE_2[row]]
            assert found == (text == "true" if text in ("true", "false") else type(found)(text)), (name, row)
        assert config.model.hidden_size // config.model.attention_heads == int(table["head_dim"])
        assert (config.model.name, config.model.gated) == (name, column == "gated")


def test_the_default_is_the_smallest_scale_of_the_paper():
    assert parse(TrainConfig, []) == parse(TrainConfig, ["model=0.5b"])


@pytest.mark.parametrize("name", yaml_names(CONFIG_ROOT / "model"))
def test_every_line_of_every_preset_is_used(name):
    config = parse(TrainConfig, [f"model={name}"])
    assert config == load_config(TrainConfig, CONFIG_ROOT / "model" / f"{name}.yaml")
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


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "none"),
        ({"dead_neuron_reinit": True}, "dead_neuron_reinit"),
        ({"l1": 1e-3, "l1_ramp_steps": 5}, "l1_warmup"),
        ({"l1_ramp_steps": 5}, "none"),
        ({"l1": 1e-3, "l1_off_steps": 5, "dead_neuron_reinit": True}, "dead_neuron_reinit_l1_warmup"),
    ],
)
def test_modification(values, name):
    assert with_values(TrainConfig(), sparsity=values).sparsity.modification == name
    assert name in MODIFICATIONS


def test_rows_have_the_coefficient_of_l1():
    assert training_columns(with_values(TrainConfig(), sparsity={"l1": 0.5}), 3)["l1"] == 0.5


@pytest.mark.parametrize(
    "option", ["sparsity.dead_neuron_reinit=true", "sparsity.exempt=0.1", "execution.sparse.backend=reference"]
)
def test_what_needs_relu(option):
    assert parse(TrainConfig, ["sparsity.l1=1", "execution.sparse.backend=triton", option])
    with pytest.raises(ConfigError, match=r"needs model.activation=relu"):
        parse(TrainConfig, ["sparsity.l1=1", "model.activation=silu", option])


# --- ranges of every program ------------------------------------------------------------------------------------------

CHECKPOINT = "checkpoint=run"


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("train", ["sparsity.l1=nan"], "sparsity.l1 must be a finite number, got nan"),
        ("train", ["optimizer.weight_decay=-1"], "optimizer.weight_decay must be at least 0"),
        ("train", ["optimizer.beta2=1"], "optimizer.beta2 must be below 1"),
        ("train", ["execution.sparse.backup=1.5"], "execution.sparse.backup must be at most 1, got 1.5"),
        ("train", ["run.dir="], "run.dir must not be empty"),
        ("train", ["run.item=.."], "run.item must be of at most 200 letters"),
        ("train", ["run.item="], "run.item must not be empty"),
        ("train", ["training.seed=-1"], "training.seed must be at least 0"),
        ("train", ["training.seed=4294967295"], "training.seed must be at most 4294967294"),
        ("train", ["training.tokens_per_step=1000000000000000000"], "training.tokens_per_step must be at most"),
        ("train", ["execution.device=mps"], "execution.device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        ("train", ["execution.sparse.backend=foo"], "backend must be one of auto, dense, .* got 'foo'"),
        ("train", ["data.validation=foo"], "data.validation must be stdlib, path:... or hf:..., got 'foo'"),
        ("train", ["data.cache_dir="], "data.cache_dir must not be empty"),
        ("gather_nonzeros", [], "checkpoint must not be empty"),
        ("gather_nonzeros", [CHECKPOINT, "groups=[0]"], "each of groups must be at least 1, got 0"),
        ("gather_nonzeros", [CHECKPOINT, "groups=[8,8]"], "groups has 8 twice"),
        ("evaluate", [CHECKPOINT, "batch=0"], "batch must be at least 1"),
        ("bench_kernels", ["timing.seconds=nan"], "timing.seconds must be a finite number"),
        ("bench_kernels", ["ops=[]"], "ops must not be empty"),
        ("bench_kernels", ["ops=[fly]"], "each of ops must be of ceiling_copy.*got 'fly'"),
        ("bench_kernels", ["ops=[down]", "metrics=[held_memory]"], "nothing to time: down"),
        ("bench_kernels", ["backends=[triton+hot,foo+hot]"], "got 'foo'"),
        ("bench_kernels", ["mean_nnz=[6000]"], "mean_nnz must be at most intermediate = 5632"),
        ("bench_kernels", ["layers=[0]"], "layers and masks_item are those of masks"),
        ("bench_kernels", ["masks_item=relu"], "layers and masks_item are those of masks"),
        ("bench_forward", ["backends=[foo]"], "each of backends: backend must be one of"),
        ("bench_forward", ["checkpoints=[a,a]"], "checkpoints has 'a' twice"),
        ("bench_training", ["micro_batch=-1"], "micro_batch must be at least 0"),
        ("bench_generate", ["batch=[1,0]"], "each of batch must be at least 1, got 0"),
        ("bench_generate", ["batch=[]"], "batch must not be empty"),
        ("bench_generate", ["new_tokens=1"], "new_tokens must be at least 2"),
        ("run_notebooks", ["notebooks="], "notebooks must not be empty"),
    ],
)
def test_values_out_of_their_range_are_refused(module, arguments, message):
    with pytest.raises(ConfigError, match=message):
        parse(program_config(module), arguments)


@pytest.mark.parametrize("module", ["train", "prepare_data", "bench_forward", "bench_training", "bench_generate"])
def test_every_program_takes_the_presets_that_its_help_lists(module):
    config = program_config(module)
    for name in yaml_names(CONFIG_ROOT / "model"):
        assert name in describe(config)
        assert parse(config, [f"model={name}"]).model.name == name


def test_an_absurdly_large_step_is_divided_without_delay():
    config = parse(TrainConfig, ["training.tokens_per_step=4294967296", "training.sequence_length=1"])
    assert micro_batch_size(config, 1) == 8


# --- entry point ------------------------------------------------------------------------------------------------------


def program_config(module):
    main = importlib.import_module(f"experiments.{module}").main
    return next(iter(typing.get_type_hints(main).values()))


def _raise(error):
    raise error


@pytest.mark.parametrize(
    ("main", "arguments", "code"),
    [
        (lambda config: None, [], 0),
        (lambda config: None, ["nonsense=1"], 2),
        (lambda config: _raise(DataError("no text")), [], 1),
        (lambda config: _raise(Stopped("by a signal")), [], 85),
        (lambda config: Path("/dev/null/x").touch(), [], 1),
        (lambda config: _raise(KeyboardInterrupt), [], 130),
    ],
)
def test_exit_codes(main, arguments, code, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(SystemExit) as caught:
        entry(main, TrainConfig)
    assert caught.value.code == code


def test_errors_are_reported_in_one_line(caplog):
    with pytest.raises(SystemExit):
        entry(lambda config: _raise(DataError("one\ntwo")), TrainConfig, [])
    assert caplog.messages == ["DataError: one two"]


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        entry(lambda config: 1 / 0, TrainConfig, [])


@pytest.mark.parametrize(
    "module",
    ["train", "gather_nonzeros", "bench_kernels", "bench_forward", "bench_training", "bench_generate", "evaluate"],
)
def test_every_program_explains_its_options(module):
    config = program_config(module)
    text = describe(config)
    assert all(f"  {key}=" in text for key in to_dict(config()))
    single = [
        line.split("=")[0].strip() for line in text.splitlines() if re.match(r"  [a-z0-9_.]+=(?!NAME|VALUE)", line)
    ]
    for group in {key.partition(".")[0] for key in single}:
        depths = [key.count(".") for key in single if key.startswith(f"{group}.")]
        assert depths == sorted(depths), "an option after a section would be taken for one of the section"
    assert not any("." not in key for key in single[sum("." not in key for key in single) :]), "top-level options first"
