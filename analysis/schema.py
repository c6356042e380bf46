"""The result row: one row is one measurement, and every file of results has these columns.

Experiments write rows (`experiments.run.results`); `analysis.load` reads and checks them. This module needs only the
standard library, so that both can import it.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    Column("op", "str", "what ran (operations below), or the name of a single kernel"),
    Column("plan", "str", "how the block computes (plans below); empty where nothing was timed"),
    Column(
        "backend",
        "str",
        "the backend that ran: dense, reference, hopper, ..., never auto; of several layers, that of the sparse ones",
    ),
    Column("hot", "int", "number of hot neurons, computed densely; empty if not applicable or not recorded"),
    Column("silent", "int", "neurons left out, which fired for none of the tokens measured (plans with `live`)"),
    Column("screened", "int", "neurons that an int8 product rules out (of sorted ones); empty if not recorded"),
    Column("backup", "float", "share of the tokens in a dense backup (training); empty without one"),
    Column("baseline", "str", "the baseline of `ratio`, for instance dense_eager; empty without a ratio"),
    Column("model", "str", "name of the model configuration: demo, 0.5b, 1b, ..."),
    Column("layers", "int", "number of decoder layers of the model"),
    Column("activation", "str", "relu or silu"),
    Column("gated", "bool", "gated or non-gated feed-forward block"),
    Column("l1", "float", "coefficient of the L1 term, whose sum is over a token's neurons"),
    Column("modification", "str", "none, l1_warmup, dead_neuron_reinit, hot_exempt, or two of them joined"),
    Column("task", "str", "name of the evaluation task"),
    Column("task_protocol", "str", "how answers were scored: prompts, items, lm-eval's version"),
    Column("layer", "int", "index of the layer, from 0; empty for a whole model"),
    Column("step", "int", "optimizer step of the checkpoint measured"),
    Column("text", "str", "name of the text that the model was trained on"),
    Column("tokens_trained", "int", "training tokens that the checkpoint has seen, repetitions included"),
    Column("tokens_per_parameter", "float", "tokens_trained over the model's parameters, embedding included"),
    # The size.
    Column("tokens", "int", "M: tokens in one call (or in the whole evaluation); in generate, new tokens"),
    Column("batch", "int", "sequences generated at once (generate)"),
    Column("prompt_tokens", "int", "tokens of each prompt (generate)"),
    Column("hidden", "int", "K: hidden size"),
    Column("intermediate", "int", "N: intermediate size"),
    Column("mean_nnz", "float", "mean non-zeros per token of the input measured"),
    Column("pattern", "str", "where the sparsity pattern comes from: synthetic, or the run and layer"),
    # The number.
    Column("metric", "str", "what was measured (metrics below)"),
    Column("unit", "str", "unit of value, low and high"),
    Column("value", "float", "the measurement: a median where n > 1; empty when it could not be measured"),
    Column("low", "float", "20th percentile of the repetitions; of accuracies, one standard error below"),
    Column("high", "float", "80th percentile of the repetitions; of accuracies, one standard error above"),
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


def check_header(header: Sequence[str]) -> None:
    """Raise `ValueError` if these are not the columns of a result row, in their order."""
    if list(header) != list(NAMES):
        missing = [name for name in NAMES if name not in header]
        unknown = [name for name in header if name not in NAMES]
        detail = f"missing {missing}, unknown {unknown}" if missing or unknown else "in another order"
        raise ValueError(f"columns are not those of analysis.schema: {detail}")


PLANS: dict[str, str] = {
    "dense": "dense products",
    "dense_live": "dense products without the neurons that fired for none of the tokens measured (silent ones)",
    "dense_fp8": "dense products of numbers rounded to 8 bits (e4m3), one scale a row: not exact, never the baseline",
    "twell": "the paper's inference format",
    "twell_hot": "twell; the most active (hot) neurons are computed by dense products",
    "twell_ordered": "twell; neurons sorted by firing rate, the hot ones, in front, are computed by dense products",
    "twell_live": "twell_ordered; neurons that fired for none of the tokens measured (silent ones) are left out",
    "csr": "training: compressed rows that share one capacity",
    "csr_hot": "csr; hot neurons are computed by dense products",
    "hybrid": "training: a dense backup of the tokens with the most non-zeros, compressed rows for the others",
    "hybrid_hot": "hybrid; hot neurons are computed by dense products",
    "by_layer": "a whole model, or a block after autotune: each layer dense or sparse, whichever is faster",
}
# The word of each plan in tables, legends and claims. The paper's method is `twell`, and `hybrid` in training.
WORDS: dict[str, str] = {
    "dense": "dense",
    "dense_live": "dense, pruned",
    "dense_fp8": "dense, FP8",
    "twell": "every neuron sparse",
    "twell_hot": "hot",
    "twell_ordered": "sorted",
    "twell_live": "sorted, pruned",
    "csr": "every neuron sparse",
    "csr_hot": "hot",
    "hybrid": "backup",
    "hybrid_hot": "hot, backup",
    "by_layer": "each layer dense or sparse",
}
# Plan -> the same with hot neurons by index, with neurons sorted by firing rate, and sorted without the silent ones.
HOT_PLANS: dict[str, str] = {"twell": "twell_hot", "csr": "csr_hot", "hybrid": "hybrid_hot"}
ORDERED_PLANS: dict[str, str] = {"twell": "twell_ordered"}
LIVE_PLANS: dict[str, str] = {"twell": "twell_live", "dense": "dense_live"}

# Mitigations of dead neurons, with the names to print. The column is empty only if the training is unknown.
MODIFICATIONS: dict[str, str] = {
    "none": "none",
    "dead_neuron_reinit": "dead-neuron reinitialisation",
    "l1_warmup": "L1 warm-up",
    "dead_neuron_reinit_l1_warmup": "dead-neuron reinitialisation and L1 warm-up",
    "hot_exempt": "hot neurons exempt from L1",
    "dead_neuron_reinit_hot_exempt": "dead-neuron reinitialisation, hot neurons exempt from L1",
}

COMPILED = "_compiled"  # behind a backend's name, in rows of whole models: what is around the blocks is compiled
# Backends in the order of tables and legends.
REFERENCE = "reference"
BACKENDS: dict[str, str] = {
    "dense": "this package's dense block",
    "dense_transformers": "unmodified transformers: what the paper compares with",
    "dense_eager": "this package's dense block, nothing compiled (of a block alone: plain torch)",
    "dense_fused": "a block: gate and up as one matrix, compiled",
    "dense_twell": "this package's dense block; of a whole model, compiled",
    "dense_compiled": "plain torch under torch.compile",
    "dense_compiled_layers": "a training step: each layer under torch.compile",
    "dense_fp8": "FP8 products, compiled: not exact, never the baseline",
    REFERENCE: "every operation in plain torch, on the formats; defines results, not made for speed",
    "triton": "kernels in Triton; with `_compiled` behind, the rest of the model is compiled",
    "hopper": "kernels in CUDA C++ for H100 and H200; likewise",
}
# The paper's baseline, without torch.compile, is TRANSFORMERS in rows from 2026-11-26 on. EAGER, in all rows, has this
# package's dense block in place of transformers': on a GPU one kernel for activation and product (in forwards from
# 2026-11-27 on for h whole), and in training less that is kept for the backward.
EAGER = "dense_eager"
TRANSFORMERS = "dense_transformers"
WHOLE_MODELS = ("model_forward", "model_training")  # operations that time a whole model against dense


class Task(NamedTuple):
    """An evaluation task: its name as printed, and the accuracy of a guess in percent."""

    title: str
    chance: float


TASKS: dict[str, Task] = {
    "hellaswag": Task("HellaSwag", 25.0),
    "commonsense_qa": Task("CommonsenseQA", 20.0),
    "piqa": Task("PIQA", 50.0),
    "winogrande": Task("WinoGrande", 50.0),
    "arc_easy": Task("ARC-easy", 25.0),
    "arc_challenge": Task("ARC-challenge", 25.0),
    "openbookqa": Task("OpenBookQA", 25.0),
}
MEAN_CHANCE = sum(task.chance for task in TASKS.values()) / len(TASKS)

FP8 = "dense_fp8"  # a plan, and a dense form of a forward: not exact, and never the baseline
OPS: dict[str, str] = {
    "train": "a training run, from its metrics",
    "nonzeros": "statistics of the activations on real text",
    "ffn_forward": "one feed-forward block, forward",
    "ffn_forward_stats": "the same with statistics, relative to the call without",
    "ffn_forward_graph": "one feed-forward block, forward, in a CUDA graph with weights that are not in the L2 cache",
    "ffn_tuned": "one feed-forward block, forward, after autotune with as many tokens or more",
    "ffn_tuned_graph": "the same in a CUDA graph, as ffn_forward_graph",
    "ffn_training": "one feed-forward block, forward and backward",
    "ffn_training_stack": "the same as in a model: four copies of the block forward, then backward; the time of one",
    "model_forward": "the whole decoder without the output head, forward",
    "model_forward_random_ids": "the same on uniformly random token ids instead of text",
    "ffn_forward_random_ids": "the blocks of that forward pass",
    "model_training": "one training step of the whole model",
    "generate": "greedy generation by the whole model: a fixed number of new tokens behind each prompt",
    "evaluate": "downstream tasks and cross-entropy",
    "ceiling_copy": "the machine: a plain copy, bytes read and written",
    "ceiling_matmul": "the machine: the gate product by torch",
    "ceiling_gather": "the machine: rows of the weights read at random",
}


class Metric(NamedTuple):
    """What a metric measures, and whether more of it is better; None if neither is."""

    unit: str
    meaning: str
    larger_is_better: bool | None = None


METRICS: dict[str, Metric] = {
    "cross_entropy": Metric("nats/token", "training cross-entropy, mean of the last steps", False),
    "validation_cross_entropy": Metric("nats/token", "cross-entropy on held-out documents", False),
    "nonzeros": Metric("neurons/token", "mean non-zeros per token, averaged over layers or of one layer"),
    "nonzeros_max": Metric("neurons/token", "largest number of non-zeros of any token"),
    "nonzeros_p50": Metric("neurons/token", "median over tokens"),
    "nonzeros_p99": Metric("neurons/token", "99th percentile over tokens"),
    "dead_fraction": Metric("fraction", "neurons not active for any of `tokens` tokens; in training, those of a step"),
    "silent_fraction": Metric("fraction", "neurons not active for any token of the text measured"),
    "hot_share": Metric("fraction", "share of all non-zeros that belong to the most active tenth of the neurons"),
    "accuracy": Metric("percent", "share of correct answers, by the sum of log-probabilities", True),
    "accuracy_norm": Metric("percent", "the same, normalised by the length of the answer", True),
    "time": Metric("ms", "time of one call", False),
    "throughput": Metric("tokens/ms", "tokens per time", True),
    "energy": Metric("mJ/token", "GPU energy per token", False),
    "peak_memory": Metric("GB", "peak of allocated device memory", False),
    "held_memory": Metric("MB", "memory held between forward and backward", False),
    "host_time": Metric("us", "host time to launch one call", False),
    "device_time": Metric(
        "ms",
        "the device is busy in one call, short pauses between kernels included; for the rest it waits for the host",
        False,
    ),
    "same_tokens": Metric(
        "fraction", "generated tokens that are those of dense_eager: rounding decides between equals"
    ),
    "bandwidth": Metric("GB/s", "bytes moved per time, in units of 1e9 bytes", True),
    "rate": Metric("TFLOP/s", "floating-point operations per time; a multiply-add counts as two", True),
}

LARGER_IS_BETTER: frozenset[str] = frozenset(name for name, metric in METRICS.items() if metric.larger_is_better)
