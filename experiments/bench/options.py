"""What the options of the benchmarks share, without torch: names of forms and operations, and most options of those of
whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from analysis.schema import FP8 as FP8  # another dense form of a forward
from experiments.run.config import option, section
from experiments.run.output import OutputConfig, device_option
from experiments.run.train_config import LARGEST_SIZE, TEXT_SOURCE, ModelConfig
from experiments.run.values import LARGEST_SEED
from experiments.timing.options import TimingConfig
from experiments.timing.plans import AUTO, Name, plan_of
from twell.names import check_name

# The dense forms of a block; the fastest of them is the baseline. The last is this package's.
OWN_DENSE = "dense_twell"
DENSE_FORMS = ("dense_eager", "dense_compiled", "dense_fused", OWN_DENSE)
# The single operations of `experiments.bench.single_ops`.
SINGLE_OPS = ("gate_pack", "gated_down", "down")
SECTION_4 = "the paper, its measurements"
SPARSE_BACKENDS = ["hopper", "triton", AUTO]  # of whole models: those made for speed
# Held memory is that of one block; and host time takes several calls in a row, whose launches must fit into a queue.
MODEL_METRICS = ("throughput", "time", "energy", "peak_memory")


@dataclass
class ModelBenchConfig:
    """Options of every benchmark of whole models."""

    checkpoints: list[str] = option(
        [], "run folders, checkpoints, or Hugging Face models; empty: `model` at random", distinct=True
    )
    model: ModelConfig = section(ModelConfig, "shape of the random model", presets="model")
    data: str = option(
        "",
        "text: stdlib, path:... or hf:...; empty: what the model was trained on. Validation split",
        pattern=TEXT_SOURCE,
    )
    dense: list[Literal["dense_eager", "dense_compiled"]] = option(
        ["dense_eager", "dense_compiled"], "dense forms; the fastest is the baseline", distinct=True
    )
    backends: list[str] = option(
        SPARSE_BACKENDS,
        "backends of kernels; auto: each layer dense or sparse, as is fastest",
        distinct=True,
        check=check_name,
    )
    device: str = device_option()
    seed: int = option(0, "of random weights and tokens", minimum=0, maximum=LARGEST_SEED)
    timing: TimingConfig = section(TimingConfig, "how long to time a model")
    run: OutputConfig = section(OutputConfig, "where results go")


@dataclass
class SequenceBenchConfig(ModelBenchConfig):
    """Options of a benchmark that runs whole sequences at once."""

    sequence: int = option(
        2048, "tokens of one sequence", unit="tokens", source=SECTION_4, minimum=1, maximum=LARGEST_SIZE
    )


def check_form(name: str) -> None:
    """Raise `ValueError` for what is no name of a form: a backend, and what `Name` allows behind it."""
    asked = Name.of(name)
    if asked.backend == AUTO:
        raise ValueError("backend auto is for whole models")
    check_name(asked.backend)
    if asked.backend == "dense":
        plan_of(name, training=False)


def exists_for(name: str, *, gated: bool) -> bool:
    """Whether a block of this kind has the operation."""
    return name != ("down" if gated else "gated_down")
