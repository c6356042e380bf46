"""The result row: one row is one measurement, and every file of results has these columns.

Experiments write rows (`experiments.run.results`), `analysis.load` reads and checks them. This module needs
nothing but the standard library, so that both sides can share it.
"""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """One column of the result row. `kind` is "str", "int", "float" or "bool"; an empty cell means "does not apply"."""

    name: str
    kind: str
    meaning: str


COLUMNS: tuple[Column, ...] = (
    # What was measured.
    Column("study", "str", "the study the row belongs to: demo, smoke, h200, l1_sweep, ..."),
    Column("item", "str", "the item of the study that produced the row, also the name of its run folder"),
    Column("op", "str", "what ran: one of OPS, or the name of a single kernel"),
    Column("plan", "str", "dense, twell (inference), hybrid or csr (training), by_layer (some layers dense), ..."),
    Column("backend", "str", "dense, reference, hopper, hopper+hot+backup, dense+hopper, ... as resolved, not 'auto'"),
    Column("baseline", "str", "what `ratio` is relative to, for instance dense_eager; empty without a ratio"),
    Column("model", "str", "name of the model configuration: demo, 0.5b, 1b, ..."),
    Column("layers", "int", "number of decoder layers of the model"),
    Column("activation", "str", "relu or silu"),
    Column("gated", "bool", "gated or non-gated feed-forward block"),
    Column("l1", "float", "coefficient of the L1 term"),
    Column("modification", "str", "none, dead_neuron_reinit or l1_warmup"),
    Column("task", "str", "name of the evaluation task"),
    Column("task_protocol", "str", "how answers were scored: prompts, items, lm-eval's version"),
    Column("layer", "int", "index of the layer, from 0; empty for a whole model"),
    Column("step", "int", "optimizer step of the checkpoint measured"),
    Column("text", "str", "name of the text that the model was trained on"),
    Column("tokens_trained", "int", "training tokens that the checkpoint has seen, repetitions counted"),
    Column("tokens_per_parameter", "float", "tokens_trained over the model's parameters, embedding included"),
    # Its size.
    Column("tokens", "int", "M: tokens in one call (or in the whole evaluation)"),
    Column("hidden", "int", "K: hidden size"),
    Column("intermediate", "int", "N: intermediate size"),
    Column("mean_nnz", "float", "mean non-zeros per token of the input measured"),
    Column("pattern", "str", "where the sparsity pattern comes from: synthetic, or the run and layer"),
    # The number.
    Column("metric", "str", "one of METRICS"),
    Column("unit", "str", "unit of value, low and high, as METRICS gives it"),
    Column("value", "float", "the measurement: a median where n > 1; empty when it could not be measured"),
    Column("low", "float", "20th percentile of the repetitions"),
    Column("high", "float", "80th percentile of the repetitions"),
    Column("n", "int", "number of repetitions"),
    Column("ratio", "float", "improvement over the baseline of the same run; above 1 is better than the baseline"),
    Column("check_error", "float", "relative error against the reference, from the same run"),
    Column("missing", "str", "why value is empty, for instance 'no NVML on this device'"),
    # Where it was measured.
    Column("device", "str", "name of the GPU or CPU"),
    Column("gpus", "int", "GPUs that one run used; empty on a CPU"),
    Column("power_state", "str", "sustained or burst, with the power limit where known"),
    Column("torch", "str", "version"),
    Column("triton", "str", "version"),
    Column("cuda", "str", "version of the CUDA runtime torch was built for"),
    Column("revision", "str", "git revision of the code"),
    Column("dirty", "bool", "whether the working tree had changes that the revision does not hold"),
    Column("seed", "int", "random seed"),
    Column("date", "str", "UTC, ISO 8601"),
)

NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)

OPS: dict[str, str] = {
    "train": "a training run, from its metrics",
    "nonzeros": "statistics of the activations on real text",
    "ffn_forward": "one feed-forward block, forward",
    "ffn_forward_stats": "the same with statistics, against itself without",
    "ffn_training": "one feed-forward block, forward and backward",
    "model_forward": "the whole decoder without the output head, forward",
    "model_training": "one training step of the whole model",
    "evaluate": "downstream tasks and cross-entropy",
    "ceiling_copy": "the machine: a plain copy, bytes read and written",
    "ceiling_matmul": "the machine: the gate product by torch",
    "ceiling_gather": "the machine: rows of the weights read at random",
}

METRICS: dict[str, tuple[str, str]] = {
    "cross_entropy": ("nats/token", "training cross-entropy, mean of the last steps"),
    "validation_cross_entropy": ("nats/token", "cross-entropy on held-out documents"),
    "nonzeros": ("neurons/token", "mean non-zeros per token, averaged over layers or of one layer"),
    "nonzeros_max": ("neurons/token", "largest number of non-zeros of any token"),
    "nonzeros_p50": ("neurons/token", "median over tokens"),
    "nonzeros_p99": ("neurons/token", "99th percentile over tokens"),
    "dead_fraction": (
        "fraction",
        "neurons not active for any of `tokens` tokens; in training, those of a step",
    ),
    "silent_fraction": ("fraction", "neurons not active for any token of the text measured"),
    "hot_share": ("fraction", "share of all non-zeros that the most active tenth of the neurons carries"),
    "union_fraction": ("fraction", "neurons active anywhere in a group of consecutive tokens, over N"),
    "accuracy": ("percent", "share of right answers, by the sum of log-probabilities"),
    "accuracy_norm": ("percent", "the same, normalised by the length of the answer"),
    "time": ("ms", "time of one call"),
    "throughput": ("tokens/ms", "tokens per time"),
    "energy": ("mJ/token", "GPU energy per token"),
    "peak_memory": ("GB", "peak of allocated device memory"),
    "held_memory": ("MB", "memory held between forward and backward"),
    "host_time": ("us", "host time to launch one call"),
    "bandwidth": ("GB/s", "bytes moved per time, 1e9 bytes"),
    "rate": ("TFLOP/s", "floating-point operations per time, a multiplication and an addition as two"),
}
