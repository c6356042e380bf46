"""The loss of a model whose weakest activations are set to zero: how many of its non-zeros it needs.

Shapes: B sequences, S positions, K hidden, N intermediate.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import pandas
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.models.llama import FeedForward, activations, feed_forward_blocks
from experiments.models.subject import load_subject

SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)


@torch.no_grad()
def without_weakest(
    checkpoint: str, shares: Sequence[float] = SHARES, tokens: int = 2**14, data: str = "", batch: int = 16
) -> pandas.DataFrame:
    """Held-out loss of a model without its weakest activations, on the CPU: one line for each share of the non-zeros
    that is set to zero. Each layer has one threshold for a share, the quantile of its activations on the first batch.

    Args:
        checkpoint: a run folder, a checkpoint, or a Hugging Face folder or hub name.
        tokens: held-out tokens that are read, at most.
        data: the text, where the model was not trained here: stdlib, path:... or hf:...

    Returns:
        share; nonzeros: mean over tokens and layers (neurons/token); cross_entropy (nats/token); change_pct: of the
        cross-entropy, against the first line (%).

    Raises:
        CheckpointError: there is no such model.
        DataError: there is no text.
    """
    subject = load_subject(checkpoint, torch.device("cpu"))
    model, blocks = subject.model, feed_forward_blocks(subject.model)
    batches = list(subject.batches(batch, max_tokens=tokens, data=data))
    sizes_L = _activations(model, blocks, batches[0][:, :-1])
    lines = []
    for share in shares:
        counts: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            for block, sizes in zip(blocks, sizes_L, strict=True):
                block.forward = functools.partial(_thresholded, block, _quantile(sizes, share), counts)  # type: ignore[method-assign]
                stack.callback(vars(block).pop, "forward")
            losses = torch.cat([_losses(model, ids_BS) for ids_BS in batches])
        nonzeros = torch.cat(counts).double().mean().item()
        lines.append({"share": share, "nonzeros": nonzeros, "cross_entropy": losses.double().mean().item()})
    frame = pandas.DataFrame(lines)
    return frame.assign(change_pct=(frame["cross_entropy"] / frame["cross_entropy"].iloc[0] - 1) * 100)


def _losses(model: nn.Module, ids_BS: Tensor) -> Tensor:
    """Cross-entropy of each token, float32 [B * S]."""
    logits_BSV = model(input_ids=ids_BS[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), ids_BS[:, 1:].flatten(), reduction="none")


def _activations(model: nn.Module, blocks: Sequence[FeedForward], ids_BS: Tensor) -> list[Tensor]:
    """The sizes of each layer's activations that are not zero, in ascending order: float [non-zeros of the batch]."""
    sizes: list[Tensor] = []

    def keep(block: FeedForward, arguments: tuple[Tensor, ...]) -> None:
        size_BSN = activations(block, arguments[0]).abs()
        sizes.append(size_BSN[size_BSN > 0].sort().values)

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.register_forward_pre_hook(keep))
        model(input_ids=ids_BS, use_cache=False)
    return sizes


def _quantile(ascending: Tensor, share: float) -> float:
    """The largest of the weakest `share`; 0 of an empty one."""
    count = round(share * len(ascending))
    return ascending[count - 1].item() if count else 0.0


def _thresholded(block: FeedForward, threshold: float, counts: list[Tensor], x_BSK: Tensor) -> Tensor:
    """The block without activations of at most `threshold`; appends the non-zeros of each token, int64 [B * S]."""
    active_BSN = activations(block, x_BSK)
    active_BSN = active_BSN.where(active_BSN.abs() > threshold, 0)
    counts.append((active_BSN != 0).sum(-1).flatten())
    h_BSN = active_BSN if block.gate_proj is None else active_BSN * block.up_proj(x_BSK)
    return block.down_proj(h_BSN)
