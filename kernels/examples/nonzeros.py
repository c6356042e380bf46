"""Measure the sparsity of a model on a text: non-zeros per token, silent and most active neurons, by layer.

    python kernels/examples/nonzeros.py

Needs matplotlib. For a checkpoint in a folder, `python -m experiments.gather_nonzeros checkpoint=FOLDER data=path:TEXT`
counts more: by position, by token, in groups of tokens.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hugging_face import CONFIG
from text import batches
from twell import feed_forward_blocks, sparsify


class Counter:
    """Counts of one block over many forwards, by a hook on it."""

    def __init__(self, block: Any) -> None:
        self.tokens = 0
        self.nonzeros: list[Tensor] = []  # int64, per token
        self.fired = torch.zeros(block.up_proj.out_features, dtype=torch.int64)  # tokens for which each neuron fired
        self.hook = block.register_forward_pre_hook(self._count)

    def _count(self, block: Any, arguments: tuple[Tensor, ...]) -> None:
        active = block.hidden(arguments[0]).flatten(0, -2) != 0
        self.nonzeros.append(active.sum(1).cpu())
        self.fired += active.sum(0).cpu()
        self.tokens += len(active)


@torch.no_grad()
def count(model: nn.Module, texts: Iterable[Tensor]) -> list[Counter]:
    """Run the model on token ids, int64 [batch, length], and count; one counter per block."""
    counters = [Counter(block) for block in feed_forward_blocks(model)]
    for ids in texts:
        model(ids, use_cache=False)
    for counter in counters:
        counter.hook.remove()
    return counters


def draw(counters: list[Counter], path: Path) -> None:
    """Non-zeros per token of each layer, and how often its neurons fire."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.violinplot([torch.cat(counter.nonzeros).numpy() for counter in counters], range(len(counters)), showmeans=True)
    left.set(xlabel="layer", ylabel="non-zeros per token", xticks=range(len(counters)), ylim=(0, None))
    for layer, counter in enumerate(counters):
        rates = (counter.fired / counter.tokens).sort(descending=True).values
        right.plot(rates, label=f"layer {layer}")
    right.set(xlabel="neurons, the busiest first", ylabel="share of the tokens", ylim=(0, 1))
    right.legend()
    figure.savefig(path, dpi=120)


def main(path: str | Path = "nonzeros.png", steps: int = 20) -> list[Counter]:
    """Count on a small text, print a table and draw the figure."""
    torch.manual_seed(0)
    # Yours: sparsify(AutoModelForCausalLM.from_pretrained(...))
    model = sparsify(AutoModelForCausalLM.from_config(CONFIG), activation="relu")
    counters = count(model.eval(), batches(steps))
    print("layer  non-zeros  silent  share of the busiest tenth")
    for layer, counter in enumerate(counters):
        busiest = counter.fired.sort(descending=True).values[: len(counter.fired) // 10].sum() / counter.fired.sum()
        mean, silent = torch.cat(counter.nonzeros).float().mean(), (counter.fired == 0).float().mean()
        print(f"{layer:5d}  {mean:9.1f}  {silent:6.1%}  {busiest:26.1%}")
    draw(counters, Path(path))
    print(f"figure: {path}")
    return counters


if __name__ == "__main__":
    main()
