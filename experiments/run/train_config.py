"""The options of a training run, grouped by their effect on its results.

`model`, `data`, `training`, `optimizer` and `sparsity` fix the science: a run continued with others is refused.
`execution` decides how the work is laid out (devices, micro-batches, compilation): results agree up to rounding.
`run` decides where results go and when they are written: no effect on them.

Defaults are the paper's: table 2 for its smallest scale (0.5B, gated) where it gives a value, else as the source says.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from experiments.run.config import option, section, to_dict
from experiments.run.errors import ConfigError

TABLE_2 = "the paper, table 2"
SCIENCE = ("model", "data", "training", "optimizer", "sparsity")
# Options of the science groups that only say where files lie and what rows call the text.
WITHOUT_EFFECT = ("data.name", "data.cache_dir")
# Where options went that an earlier version had elsewhere.
MOVED = {
    f"sparsity.{name}": f"execution.sparse.{name}"
    for name in ("backend", "capacity", "backup", "hot_neurons", "to_sparse_below", "to_dense_above")
}


@dataclass
class ModelConfig:
    """A Llama-style decoder with the paper's feed-forward block."""

    name: str = option("0.5b", "name of the configuration, for result rows", source="the paper, table 1")
    layers: int = option(8, "decoder layers: 8, 18, 28, 38 for 0.5B, 1B, 1.5B, 2B", source=TABLE_2)
    hidden_size: int = option(2048, "K, width of the residual stream", source=TABLE_2)
    intermediate_size: int = option(5632, "N, neurons of a feed-forward block", source=TABLE_2)
    attention_heads: int = option(
        32, "query heads; a head has hidden_size / attention_heads dimensions", source=TABLE_2
    )
    key_value_heads: int = option(32, "key and value heads", source=TABLE_2)
    activation: Literal["relu", "relu2", "silu"] = option(
        "relu", "of the gate (of the up projection if not gated); relu2 is the square of relu", source=TABLE_2
    )
    gated: bool = option(True, "h = relu(x Wg) * (x Wu) if true, h = relu(x Wu) if false", source=TABLE_2)
    vocab_size: int = option(49152, "rows of the embedding, at least the tokenizer's size", source=TABLE_2)
    max_positions: int = option(2048, "longest sequence", unit="tokens", source=TABLE_2 + " (sequence length)")
    initializer_range: float = option(0.02, "standard deviation of the initial weights", source=TABLE_2)
    rope_theta: float = option(10000.0, "base of the rotary position embedding", source=TABLE_2)
    tied_embeddings: bool = option(True, "the output head is the embedding", source=TABLE_2)
    rms_norm_eps: float = option(1e-6, "epsilon of the RMS norms", source="transformers' Llama")

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "intermediate_size", "attention_heads", "key_value_heads", "vocab_size"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1", getattr(self, name))
        _require(
            self.hidden_size % (2 * self.attention_heads) == 0,
            f"model.hidden_size must be a multiple of 2 * model.attention_heads = {2 * self.attention_heads}",
            self.hidden_size,
        )
        _require(
            self.attention_heads % self.key_value_heads == 0,
            f"model.attention_heads must be a multiple of model.key_value_heads = {self.key_value_heads}",
            self.attention_heads,
        )

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
        "stdlib (the Python standard library's sources), path:FILE|FOLDER|GLOB (.txt .md .jsonl[.gz|.xz|.zst] "
        ".parquet), or hf:NAME[:CONFIG][@SPLIT] (a data set of the Hugging Face hub, streamed)",
        source="ours, needs no network; the paper: hf:HuggingFaceTB/smollm-corpus:fineweb-edu-dedup",
    )
    name: str = option("", "what result rows call the text; empty: the source, without the folders of a path")
    validation: str = option("", "source of the validation text; empty: a share of the documents is held out")
    # Of the some 600 documents of the standard library, 1% has come out as none at all.
    validation_share: float = option(0.03, "share of the documents held out, chosen by their hash", unit="fraction")
    text_field: str = option("text", "JSON key or parquet column that holds the text")
    max_tokens: int | None = option(
        None, "use at most this many training tokens; null: all (of hf: as many as the steps take)", unit="tokens"
    )
    tokenizer: str = option(
        "auto",
        "bpe (byte-level BPE of model.vocab_size entries, trained on the training text), a hub name such as gpt2, "
        "or a local folder; auto: HuggingFaceTB/cosmo2-tokenizer for hf:, else bpe",
        source="table 2 says gpt2, with 49152 entries: that is the GPT-2-style tokenizer of the SmolLM corpus",
    )
    tokenizer_sample_mb: int = option(32, "text that the BPE is trained on", unit="MB")
    cache_dir: str = option("cache", "where token files and trained tokenizers are kept, by their content")

    def __post_init__(self) -> None:
        known = self.source == "stdlib" or self.source.startswith(("path:", "hf:"))
        _require(known, "data.source must be stdlib, path:... or hf:...", self.source)
        _require(0 < self.validation_share < 1, "data.validation_share must lie between 0 and 1", self.validation_share)
        _require(self.max_tokens is None or self.max_tokens >= 1, "data.max_tokens must be positive", self.max_tokens)

    @property
    def label(self) -> str:
        """Name of the text in result rows; folders of this machine are left out of it."""
        kind, _, rest = self.source.partition(":")
        return self.name or (f"path:{Path(rest).name}" if kind == "path" else self.source)


@dataclass
class TrainingConfig:
    """How long to train and on how much at a time. `tokens_per_step` fixes the science, whatever the devices."""

    steps: int = option(10000, "optimizer steps: 10000, 20000, 30000, 40000 for 0.5B, 1B, 1.5B, 2B", source=TABLE_2)
    tokens_per_step: int = option(1_048_576, "tokens of one optimizer step", unit="tokens", source=TABLE_2)
    sequence_length: int = option(2048, "tokens of one sequence", unit="tokens", source=TABLE_2)
    precision: Literal["bfloat16", "float32"] = option(
        "bfloat16", "of the products (autocast); weights and optimizer stay in float32", source=TABLE_2
    )
    seed: int = option(0, "of the initial weights, the order of the data, and reinitialised neurons")

    def __post_init__(self) -> None:
        for name in ("steps", "tokens_per_step", "sequence_length"):
            _require(getattr(self, name) >= 1, f"training.{name} must be at least 1", getattr(self, name))
        _require(
            self.tokens_per_step % self.sequence_length == 0,
            f"training.tokens_per_step must be a multiple of training.sequence_length = {self.sequence_length}",
            self.tokens_per_step,
        )


@dataclass
class OptimizerConfig:
    """AdamW with a cosine schedule after a linear warm-up, and gradient clipping."""

    learning_rate: float = option(1e-3, "at the end of the warm-up", source=TABLE_2)
    warmup_steps: int = option(600, "steps of linear growth from 0", unit="steps", source=TABLE_2)
    final_fraction: float = option(
        0.0, "learning rate at the last step over the peak", unit="fraction", source="ours, the paper does not say"
    )
    weight_decay: float = option(
        0.1,
        "decoupled; on matrices (with the embedding), not on norms",
        source=TABLE_2 + ", which does not say on what",
    )
    beta1: float = option(0.9, "decay of the first moment", source=TABLE_2)
    beta2: float = option(0.95, "decay of the second moment", source=TABLE_2)
    eps: float = option(1e-8, "added to the root of the second moment", source=TABLE_2)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", source=TABLE_2)

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, "optimizer.learning_rate must be positive", self.learning_rate)
        _require(self.max_grad_norm > 0, "optimizer.max_grad_norm must be positive", self.max_grad_norm)
        _require(self.warmup_steps >= 0, "optimizer.warmup_steps must not be negative", self.warmup_steps)


@dataclass
class SparsityConfig:
    """The L1 term (the equation of the loss in the paper) and the two dead-neuron mitigations."""

    l1: float = option(0.0, "coefficient of the L1 term; the paper recommends 2e-5, and 3e-4 with its warm-up")
    l1_reduction: Literal["sum", "mean"] = option(
        "sum",
        "over the neurons of a token; always a mean over tokens and layers",
        source="the paper's coefficients only fit the sum, though its equation also divides by N",
    )
    l1_off_steps: int = option(0, "steps without L1 at the beginning; 5000 in the paper's warm-up study", unit="steps")
    l1_ramp_steps: int = option(0, "steps of linear growth to l1 after that; 5000 in that study", unit="steps")
    dead_neuron_reinit: bool = option(False, "after each step, move the gate columns of dead neurons towards new draws")
    reinit_strength: float = option(0.1, "share of the new draw", unit="fraction", source="the paper's study")
    reinit_std: float = option(0.02, "standard deviation of the new draw", source="the paper's study")

    def __post_init__(self) -> None:
        _require(self.l1 >= 0, "sparsity.l1 must not be negative", self.l1)
        _require(0 <= self.reinit_strength <= 1, "sparsity.reinit_strength must lie in 0..1", self.reinit_strength)
        _require(self.l1_off_steps >= 0, "sparsity.l1_off_steps must not be negative", self.l1_off_steps)
        _require(self.l1_ramp_steps >= 0, "sparsity.l1_ramp_steps must not be negative", self.l1_ramp_steps)


@dataclass
class SparseConfig:
    """How the feed-forward blocks are computed."""

    backend: str = option(
        "auto",
        "of the feed-forward blocks: auto (each layer dense or sparse, whichever is faster for its non-zeros by costs "
        "measured at the start), or one of kernels.available_backends() for every layer",
    )
    capacity: int | None = option(
        None,
        "non-zeros per token that a sparse layer can keep for its backward pass; where there are more, it "
        "grows and the step is retried. null: from the measured mean, see training/backend_scheduler.py",
        unit="non-zeros/token",
    )
    backup: float | None = option(
        None,
        "share of the tokens, those with the most non-zeros, that a sparse layer computes and keeps densely, beside "
        "its capacity; null: what the backend does by itself (on a GPU: none)",
        unit="fraction",
        source="ours; the paper has 1/8, the dense backup of its hybrid format",
    )
    hot_neurons: bool = option(
        True, "leave the busiest neurons of sparse layers to dense products where that is faster"
    )
    to_sparse_below: float = option(
        0.9,
        "auto: a dense layer becomes sparse when its non-zeros fall below this share of the break-even",
        unit="fraction",
        source="ours: 10% for the error of the measured costs",
    )
    to_dense_above: float = option(
        1.0,
        "auto: a sparse layer becomes dense again when its non-zeros rise above this share of the break-even",
        unit="fraction",
        source="ours: the gap to to_sparse_below keeps a layer from switching to and fro",
    )

    def __post_init__(self) -> None:
        _require(
            self.capacity is None or self.capacity >= 1, "execution.sparse.capacity must be at least 1", self.capacity
        )
        _require(self.backup is None or 0 <= self.backup <= 1, "execution.sparse.backup must lie in 0..1", self.backup)
        _require(self.to_sparse_below > 0, "execution.sparse.to_sparse_below must be positive", self.to_sparse_below)
        _require(
            self.to_dense_above >= self.to_sparse_below,
            f"execution.sparse.to_dense_above must be at least to_sparse_below = {self.to_sparse_below}",
            self.to_dense_above,
        )


@dataclass
class ExecutionConfig:
    """How the work is laid out. Under torchrun every process takes its share of each step."""

    device: str = option("auto", "cpu, cuda, or auto: cuda where there is one")
    micro_batch: int | None = option(
        None, "sequences of one forward pass; null: the largest divisor of a process's share up to 8", unit="sequences"
    )
    compile: bool = option(False, "torch.compile every layer and the loss")
    activation_checkpointing: bool = option(False, "recompute each layer in the backward pass to save memory")
    shard_optimizer: bool = option(
        False, "deal AdamW's moments (8 bytes a parameter) out to the processes; checkpoints and results stay the same"
    )
    sparse: SparseConfig = section(SparseConfig, "how the feed-forward blocks are computed, dense or sparse")


@dataclass
class RunConfig:
    """Where results go and when they are written."""

    study: str = option("local", "name of the study, for result rows and the run folder")
    item: str = option("train", "name of the run in the study")
    dir: str | None = option(None, "the run's folder; null: runs/<study>/<item>. A run found there is continued")
    log_every: int = option(10, "steps between two lines of metrics.jsonl", unit="steps")
    evaluate_every: int = option(500, "steps between two validations; the last step is always validated", unit="steps")
    evaluation_tokens: int = option(1_048_576, "validation tokens used, if there are as many", unit="tokens")
    checkpoint_every: int = option(500, "steps between two checkpoints; the last step always has one", unit="steps")
    keep_checkpoints: int = option(2, "older ones are deleted")
    max_seconds: float | None = option(None, "checkpoint and stop (exit code 85) after this time", unit="s")
    max_steps: int | None = option(None, "checkpoint and stop (exit code 85) after this many steps in this process")
    progress: Literal["auto", "bar", "lines", "none"] = option(
        "auto", "auto: a bar on a terminal, else a line every 10 s"
    )

    def __post_init__(self) -> None:
        for name in ("log_every", "evaluate_every", "checkpoint_every", "keep_checkpoints", "evaluation_tokens"):
            _require(getattr(self, name) >= 1, f"run.{name} must be at least 1", getattr(self, name))
        _require(self.max_steps is None or self.max_steps >= 1, "run.max_steps must be at least 1", self.max_steps)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.study / self.item


@dataclass
class TrainConfig:
    """Train a Llama-style model with sparse (ReLU) or dense (SiLU) feed-forward blocks.

    Exit codes: 0 done, 1 failed, 2 wrong configuration, 85 stopped by SIGTERM, SIGUSR2, Ctrl-C or a limit of `run`,
    after writing a checkpoint: the same command continues.
    """

    MOVED: ClassVar[dict[str, str]] = MOVED

    model: ModelConfig = section(ModelConfig, "what is trained", presets="model")
    data: DataConfig = section(DataConfig, "what it is trained on", short="source")
    training: TrainingConfig = section(TrainingConfig, "how long and on how much at a time")
    optimizer: OptimizerConfig = section(OptimizerConfig, "AdamW, schedule, clipping")
    sparsity: SparsityConfig = section(SparsityConfig, "L1 term, dead neurons")
    execution: ExecutionConfig = section(ExecutionConfig, "no effect on results beyond rounding")
    run: RunConfig = section(RunConfig, "no effect on results")

    def __post_init__(self) -> None:
        _require(
            self.training.sequence_length <= self.model.max_positions,
            f"training.sequence_length must be at most model.max_positions = {self.model.max_positions}",
            self.training.sequence_length,
        )
        if self.model.activation == "silu" and self.sparsity.dead_neuron_reinit:
            raise ConfigError(
                "sparsity.dead_neuron_reinit needs model.activation=relu or relu2: no other neuron is ever dead"
            )
        backend = self.execution.sparse.backend
        if self.model.activation == "silu" and backend not in ("auto", "dense"):
            needs = "needs model.activation=relu or relu2: other blocks are always dense"
            raise ConfigError(f"execution.sparse.backend={backend} {needs}")
        if self.data.source.startswith("hf:") and self.data.max_tokens is None:
            budget = self.training.steps * self.training.tokens_per_step
            self.data = dataclasses.replace(self.data, max_tokens=budget)

    @property
    def modification(self) -> str:
        """Of the result row: which of the paper's two mitigations of dead neurons is on."""
        if self.sparsity.dead_neuron_reinit:
            return "dead_neuron_reinit"
        return "l1_warmup" if self.sparsity.l1_off_steps or self.sparsity.l1_ramp_steps else "none"


def science(config: TrainConfig) -> dict[str, Any]:
    """The options that decide the results, flat: what two processes must share to continue the same run."""
    values = {key: value for key, value in to_dict(config).items() if key.split(".")[0] in SCIENCE}
    return {key: value for key, value in values.items() if key not in WITHOUT_EFFECT}


def training_columns(config: TrainConfig, step: int) -> dict[str, Any]:
    """The columns of a result row that say how much training a checkpoint has had, and on which text."""
    tokens = step * config.training.tokens_per_step
    return {
        "step": step,
        "text": config.data.label,
        "tokens_trained": tokens,
        "tokens_per_parameter": tokens / config.model.parameters,
        "l1": config.sparsity.l1,
        "modification": config.modification,
        "seed": config.training.seed,
    }


def sequences_per_step(config: TrainConfig) -> int:
    """Sequences of one optimizer step, over all devices."""
    return config.training.tokens_per_step // config.training.sequence_length


def micro_batch_size(config: TrainConfig, processes: int) -> int:
    """Sequences of one forward pass in one of `processes` processes; the rest of a step is accumulation.

    Raises `ConfigError` when a step cannot be dealt out evenly, naming the micro-batches that can be.
    """
    total = sequences_per_step(config)
    if total % processes:
        raise ConfigError(
            f"a step has {total} sequences (training.tokens_per_step / training.sequence_length), which {processes} "
            "processes cannot share evenly"
        )
    share = total // processes
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    if config.execution.micro_batch is None:
        return max(size for size in divisors if size <= 8)
    if config.execution.micro_batch not in divisors:
        raise ConfigError(
            f"execution.micro_batch={config.execution.micro_batch} does not divide the {share} sequences that each of "
            f"{processes} processes has in a step; valid: {', '.join(map(str, divisors))}"
        )
    return config.execution.micro_batch


def with_values(config: TrainConfig, **sections: dict[str, Any]) -> TrainConfig:
    """A copy with other values: `with_values(config, sparsity={"l1": 1e-5})`."""
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def _require(condition: bool, wanted: str, got: Any) -> None:
    if not condition:
        raise ConfigError(f"{wanted}, got {got!r}")
