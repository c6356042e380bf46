"""The options of a training run, grouped by their effect on its results.

`model`, `data`, `training`, `optimizer` and `sparsity` fix the science: a run continued with others is refused.
`execution` decides how the work is laid out (devices, micro-batches, compilation): results agree up to rounding.
`run` decides where results go and when they are written: no effect on them.

Defaults are the paper's: table 2 for its smallest scale (0.5B, gated) where it gives a value, else as the source says.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from experiments.run.config import option, section, to_dict
from experiments.run.errors import ConfigError
from experiments.run.values import DEVICE, LARGEST_SEED, NAME, Pattern
from twell.names import check_name

TABLE_2 = "the paper, table 2"
LARGEST_SIZE = 2**20  # of a dimension: more is a slip of the keyboard
SIZE: dict[str, Any] = {"minimum": 1, "maximum": LARGEST_SIZE}
DEFAULT_MICRO_BATCH = 8
# In a run's folder: which tokens `experiments.prepare_data` made.
TEXT = "text.json"
# Options that decide where results go, how work is laid out, where files lie, and what rows call the text.
WITHOUT_EFFECT = ("run.", "execution.", "data.name", "data.cache_dir")
TEXT_SOURCE = Pattern(re.compile(r"stdlib|(path|hf):.+", re.DOTALL), "stdlib, path:... or hf:...")


@dataclass
class ModelConfig:
    """A Llama-style decoder with the paper's feed-forward block."""

    name: str = option("0.5b", "name of the configuration, for result rows", source="the paper, table 1", required=True)
    layers: int = option(
        8, "decoder layers: 8, 18, 28, 38 for 0.5B, 1B, 1.5B, 2B", source=TABLE_2, minimum=1, maximum=1000
    )
    hidden_size: int = option(2048, "K, width of the residual stream", source=TABLE_2, **SIZE)
    intermediate_size: int = option(5632, "N, neurons of a feed-forward block", source=TABLE_2, **SIZE)
    attention_heads: int = option(
        32, "query heads; a head has hidden_size / attention_heads dimensions", source=TABLE_2, **SIZE
    )
    key_value_heads: int = option(32, "key and value heads", source=TABLE_2, **SIZE)
    activation: Literal["relu", "relu2", "silu"] = option(
        "relu", "of the gate (of the up projection if not gated); relu2 is the square of relu", source=TABLE_2
    )
    gated: bool = option(True, "h = relu(x Wg) * (x Wu) if true, h = relu(x Wu) if false", source=TABLE_2)
    vocab_size: int = option(
        49152, "rows of the embedding, at least the tokenizer's size", source=TABLE_2, minimum=1, maximum=2**24
    )
    max_positions: int = option(
        2048, "longest sequence", unit="tokens", source=TABLE_2 + " (sequence length)", minimum=1, maximum=2**24
    )
    initializer_range: float = option(
        0.02, "standard deviation of the initial weights", source=TABLE_2, minimum=0, maximum=1
    )
    rope_theta: float = option(10000.0, "base of the rotary position embedding", source=TABLE_2, above=0)
    tied_embeddings: bool = option(True, "the output head is the embedding", source=TABLE_2)
    rms_norm_eps: float = option(1e-6, "epsilon of the RMS norms", source="transformers' Llama", minimum=0)

    def __post_init__(self) -> None:
        _require_multiple("model.hidden_size", self.hidden_size, "2 * model.attention_heads", 2 * self.attention_heads)
        _require_multiple("model.attention_heads", self.attention_heads, "model.key_value_heads", self.key_value_heads)

    @property
    def parameters(self) -> int:
        """Number of parameters, embedding and norms included."""
        hidden, key_value = self.hidden_size, self.hidden_size // self.attention_heads * self.key_value_heads
        attention = 2 * hidden * (hidden + key_value)
        feed_forward = (3 if self.gated else 2) * hidden * self.intermediate_size
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * hidden
        return embeddings + self.layers * (attention + feed_forward + 2 * hidden) + hidden


@dataclass
class DataConfig:
    """Text, how it is split, and how it becomes tokens."""

    source: str = option(
        "stdlib",
        "stdlib (the Python standard library's sources), path:FILE|FOLDER|GLOB (.jsonl[.gz|.xz|.zst] .parquet, or .txt "
        ".md; of a folder, hidden files, other kinds and text beside data files are left out, and names like train-0, "
        "val and test are splits; the log lists what is read), or hf:NAME[:CONFIG][@SPLIT] (a data set of the Hugging "
        "Face hub, streamed: the commit that was the newest when data.cache_dir first met it; "
        "hf:NAME@REVISION:[CONFIG][@SPLIT] names another)",
        source="ours, needs no network; the paper: hf:HuggingFaceTB/smollm-corpus:fineweb-edu-dedup",
        required=True,
        pattern=TEXT_SOURCE,
    )
    name: str = option("", "what result rows call the text; empty: the source, without the folders of a path")
    validation: str = option(
        "",
        "source of the validation text; empty: a share of the documents is held out",
        pattern=TEXT_SOURCE,
    )
    # Of the some 600 documents of the standard library, 1% has come out as none at all.
    validation_share: float = option(
        0.03,
        "share of the documents held out, chosen by their hash; at least the end of one",
        unit="fraction",
        above=0,
        below=1,
    )
    text_field: str = option("text", "JSON key or parquet column that holds the text", required=True)
    max_tokens: int | None = option(
        None,
        "use at most this many training tokens; null: all (of hf: as many as the steps take)",
        unit="tokens",
        minimum=1,
    )
    tokenizer: str = option(
        "auto",
        "bpe (byte-level BPE of model.vocab_size entries, trained on the training text), a hub name such as gpt2, "
        "or a local folder; auto: HuggingFaceTB/cosmo2-tokenizer for hf:, else bpe",
        source="table 2 says gpt2, with 49152 entries: that is the GPT-2-style tokenizer of the SmolLM corpus",
        required=True,
    )
    tokenizer_sample_mb: int = option(32, "text that the BPE is trained on", unit="MB", minimum=1, maximum=1_000_000)
    cache_dir: str = option(
        "cache", "where token files and trained tokenizers are kept, by their content", required=True
    )

    @property
    def label(self) -> str:
        """Name of the text in result rows; folders of this machine are left out of it."""
        kind, _, rest = self.source.partition(":")
        return self.name or (f"path:{Path(rest).name}" if kind == "path" else self.source)


@dataclass
class TrainingConfig:
    """How long to train and on how much at a time. `tokens_per_step` fixes the science, whatever the devices."""

    steps: int = option(
        10000, "optimizer steps: 10000, 20000, 30000, 40000 for 0.5B, 1B, 1.5B, 2B", source=TABLE_2, minimum=1
    )
    tokens_per_step: int = option(
        1_048_576, "tokens of one optimizer step", unit="tokens", source=TABLE_2, minimum=1, maximum=2**32
    )
    sequence_length: int = option(2048, "tokens of one sequence", unit="tokens", source=TABLE_2, minimum=1)
    precision: Literal["bfloat16", "float32"] = option(
        "bfloat16", "of the products (autocast); weights and optimizer stay in float32", source=TABLE_2
    )
    seed: int = option(
        0, "of the initial weights, the order of the data, and reinitialised neurons", minimum=0, maximum=LARGEST_SEED
    )

    def __post_init__(self) -> None:
        length = self.sequence_length
        _require_multiple("training.tokens_per_step", self.tokens_per_step, "training.sequence_length", length)


@dataclass
class OptimizerConfig:
    """AdamW with a cosine schedule after a linear warm-up, and gradient clipping."""

    learning_rate: float = option(1e-3, "at the end of the warm-up", source=TABLE_2, above=0)
    warmup_steps: int = option(600, "steps of linear growth from 0", unit="steps", source=TABLE_2, minimum=0)
    final_fraction: float = option(
        0.0,
        "learning rate over the peak where the cosine ends, one step after the last",
        unit="fraction",
        source="ours, the paper does not say",
        minimum=0,
        maximum=1,
    )
    weight_decay: float = option(
        0.1,
        "decoupled; on matrices (with the embedding), not on norms",
        source=TABLE_2 + ", which does not say on what",
        minimum=0,
    )
    beta1: float = option(0.9, "decay of the first moment", source=TABLE_2, minimum=0, below=1)
    beta2: float = option(0.95, "decay of the second moment", source=TABLE_2, minimum=0, below=1)
    eps: float = option(1e-8, "added to the root of the second moment", source=TABLE_2, minimum=0)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", source=TABLE_2, above=0)


@dataclass
class SparsityConfig:
    """The L1 term (the equation of the loss in the paper), who pays it, and the two dead-neuron mitigations."""

    l1: float = option(
        0.0,
        "coefficient of the L1 term: the mean, over layers and the tokens of a step, of the sum over neurons (the "
        "paper's coefficients only fit the sum, though its equation also divides by N); the paper recommends 2e-5, and "
        "3e-4 with its warm-up; the code it released makes 64 times that of both (paper_figures/README.md)",
        minimum=0,
    )
    l1_off_steps: int = option(
        0, "steps without L1 at the beginning; 5000 in the paper's warm-up study", unit="steps", minimum=0
    )
    l1_ramp_steps: int = option(
        0, "steps of linear growth to l1 after that; 5000 in that study", unit="steps", minimum=0
    )
    exempt: float = option(
        0.0,
        "share of each layer's neurons, those that fire most often, that pay no L1; 0.125 is a good one",
        unit="fraction",
        source="ours, see training/hot_exempt.py",
        minimum=0,
        below=1,
    )
    dead_neuron_reinit: bool = option(False, "after each step, move the gate columns of dead neurons towards new draws")
    reinit_strength: float = option(
        0.1, "share of the new draw", unit="fraction", source="the paper's study", minimum=0, maximum=1
    )
    reinit_std: float = option(0.02, "standard deviation of the new draw", source="the paper's study", minimum=0)

    def __post_init__(self) -> None:
        if self.exempt and not self.l1:
            raise ConfigError(f"sparsity.exempt={self.exempt} needs sparsity.l1 > 0: no neuron pays L1 without it")

    @property
    def modification(self) -> str:
        """Modification in the result row: which of the paper's two mitigations of dead neurons are on; without L1, no
        warm-up is. "hot_exempt" (a warm-up usually included) stands in place of "l1_warmup"."""
        warmup = self.l1 > 0 and not self.exempt and (self.l1_off_steps or self.l1_ramp_steps)
        on = {"dead_neuron_reinit": self.dead_neuron_reinit, "l1_warmup": warmup, "hot_exempt": self.exempt}
        return "_".join(name for name, used in on.items() if used) or "none"


@dataclass
class SparseConfig:
    """How the feed-forward blocks are computed."""

    backend: str = option(
        "auto",
        "of the feed-forward blocks: auto (each layer dense or sparse, whichever is faster, measured as its non-zeros "
        "change), or one of twell.available_backends() for every layer",
        required=True,
        check=check_name,
    )
    capacity: int | None = option(
        None,
        "non-zeros per token that a sparse layer can keep for its backward pass; with more, its gradients come from "
        "dense products. null: as many as are measured, and more for the next call where these did not do",
        unit="non-zeros/token",
        **SIZE,
    )
    backup: float | None = option(
        None,
        "share of the tokens, those with the most non-zeros, that a sparse layer computes and keeps densely, beside "
        "its capacity; null: what the backend does by itself (on a GPU: none)",
        unit="fraction",
        source="ours; the paper has 1/8, the dense backup of its hybrid format",
        minimum=0,
        maximum=1,
    )
    hot_neurons: bool = option(
        True, "leave the busiest neurons of sparse layers to dense products where that is faster"
    )


@dataclass
class ExecutionConfig:
    """How the work is laid out. Under torchrun every process takes its share of each step."""

    device: str = option("auto", "cpu, cuda, or auto: cuda where there is one", required=True, pattern=DEVICE)
    micro_batch: int | None = option(
        None,
        "most sequences of one forward pass: the largest number up to this that divides a process's share of a step is "
        f"taken. null: {DEFAULT_MICRO_BATCH}",
        unit="sequences",
        minimum=1,
    )
    compile: bool = option(False, "torch.compile every layer and the loss")
    activation_checkpointing: bool = option(False, "recompute each layer in the backward pass to save memory")
    sparse: SparseConfig = section(SparseConfig, "how the feed-forward blocks are computed, dense or sparse")


@dataclass
class RunConfig:
    """Where results go and when they are written."""

    study: str = option("local", "name of the study, for result rows and the run folder", required=True, pattern=NAME)
    item: str = option("train", "name of the run in the study", required=True, pattern=NAME)
    dir: str | None = option(
        None, "the run's folder; null: runs/<study>/<item>. A run found there is continued", required=True
    )
    log_every: int = option(10, "steps between two lines of metrics.jsonl", unit="steps", minimum=1)
    evaluate_every: int = option(
        500, "steps between two validations; the last step is always validated", unit="steps", minimum=1
    )
    evaluation_tokens: int = option(1_048_576, "validation tokens used, if there are as many", unit="tokens", minimum=1)
    checkpoint_every: int = option(
        500, "steps between two checkpoints; the last step always has one", unit="steps", minimum=1
    )
    keep_checkpoints: int = option(2, "older ones are deleted", minimum=1)
    max_seconds: float | None = option(None, "checkpoint and stop (exit code 85) after this time", unit="s", minimum=0)
    max_steps: int | None = option(
        None, "checkpoint and stop (exit code 85) after this many steps in this process", minimum=1
    )
    log: list[Literal["tensorboard", "wandb"]] = option(
        [], "where logged steps are sent beside metrics.jsonl; needs the package of that name", distinct=True
    )
    progress: Literal["auto", "bar", "lines", "none"] = option(
        "auto", "auto: a bar on a terminal, else a line every 10 s"
    )

    @property
    def folder(self) -> Path:
        return Path(self.dir) if self.dir is not None else Path("runs") / self.study / self.item


@dataclass
class TrainConfig:
    """Train a Llama-style model with sparse (ReLU) or dense (SiLU) feed-forward blocks.

    Exit codes: 0 done, 1 failed, 2 wrong configuration, 85 stopped by SIGTERM, SIGUSR2, Ctrl-C or a limit of `run`,
    after writing a checkpoint: the same command continues.
    """

    model: ModelConfig = section(ModelConfig, "what is trained", presets="model")
    data: DataConfig = section(DataConfig, "what it is trained on", short="source")
    training: TrainingConfig = section(TrainingConfig, "how long and on how much at a time")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW, schedule, clipping")
    sparsity: SparsityConfig = section(SparsityConfig, "L1 term, dead neurons")
    execution: ExecutionConfig = section(ExecutionConfig, "no effect on results beyond rounding")
    run: RunConfig = section(RunConfig, "no effect on results")

    def __post_init__(self) -> None:
        length, longest = self.training.sequence_length, self.model.max_positions
        if length > longest:
            raise ConfigError(f"training.sequence_length must be at most model.max_positions = {longest}, got {length}")
        backend, exempt = self.execution.sparse.backend, self.sparsity.exempt
        needing = {
            "sparsity.dead_neuron_reinit": (self.sparsity.dead_neuron_reinit, "no other neuron is ever dead"),
            f"execution.sparse.backend={backend}": (backend not in ("auto", "dense"), "other blocks are always dense"),
            f"sparsity.exempt={exempt}": (exempt, "other neurons always fire"),
        }
        for what, (is_on, why) in needing.items():
            if is_on and self.model.activation == "silu":
                raise ConfigError(f"{what} needs model.activation=relu or relu2: {why}")
        if self.data.source.startswith("hf:") and self.data.max_tokens is None:
            budget = self.training.steps * self.training.tokens_per_step
            self.data = dataclasses.replace(self.data, max_tokens=budget)


def science(config: Any) -> dict[str, Any]:
    """The options of a program that decide its results, flat: what two trainings must share to be the same run."""
    return {key: value for key, value in to_dict(config).items() if not key.startswith(WITHOUT_EFFECT)}


def science_differences(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """What differs between the `science` that results were made with and another, in words; empty if nothing does, or
    where nothing is known of it."""
    if before is None:
        return ""
    nothing = "no such option"
    changed = [key for key in now | before if before.get(key, nothing) != now.get(key, nothing)]
    return "; ".join(f"{key} was {before.get(key, nothing)!r}, now {now.get(key, nothing)!r}" for key in changed)


def model_columns(model: Any) -> dict[str, Any]:
    """The columns of a result row that describe a model, by its `ModelConfig` or `ModelShape`."""
    return {
        "model": model.name,
        "layers": model.layers,
        "activation": model.activation,
        "gated": model.gated,
        "hidden": model.hidden_size,
        "intermediate": model.intermediate_size,
    }


def training_columns(config: TrainConfig, step: int) -> dict[str, Any]:
    """The columns of a result row that say how much training a checkpoint has had, and on which text."""
    tokens = step * config.training.tokens_per_step
    return {
        "step": step,
        "text": config.data.label,
        "tokens_trained": tokens,
        "tokens_per_parameter": tokens / config.model.parameters,
        "l1": config.sparsity.l1,
        "modification": config.sparsity.modification,
        "seed": config.training.seed,
    }


def sequences_per_step(config: TrainConfig) -> int:
    """Sequences of one optimizer step, over all devices."""
    return config.training.tokens_per_step // config.training.sequence_length


def micro_batch_size(config: TrainConfig, processes: int) -> int:
    """Sequences of one forward pass in one of `processes` processes; the rest of a step is accumulation: the largest
    number that divides a process's share of a step and is at most `execution.micro_batch`.

    Raises `ConfigError` when a step cannot be dealt out evenly.
    """
    total = sequences_per_step(config)
    if total % processes:
        raise ConfigError(
            f"a step has {total} sequences (training.tokens_per_step / training.sequence_length), which {processes} "
            "processes cannot share evenly"
        )
    share, most = total // processes, config.execution.micro_batch or DEFAULT_MICRO_BATCH
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return max(size for size in (*small, *(share // size for size in small)) if size <= most)


def _require_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise ConfigError(f"{name} must be a multiple of {of_name} = {of}, got {value}")
