"""The block in a plain PyTorch model: your own transformer layer, trained to reverse sequences.

python kernels/examples/plain_pytorch.py
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell import SparseFeedForward, feed_forward_blocks, l1_penalty

SYMBOLS, LENGTH, WIDTH, HEADS = 12, 8, 64, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.feed_forward = SparseFeedForward(WIDTH, 4 * WIDTH, keep_stats=True)  # gated; dense until .plan is set

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[0](x)
        x = x + self.attention(z, z, z, need_weights=False)[0]
        return x + self.feed_forward(self.norms[1](x))


class Reverser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(ids) + self.positions))


def main(steps: int = 600, l1: float = 1e-3) -> tuple[float, float]:
    """Train; (share of symbols that are right, mean non-zeros per token), of fresh sequences."""
    torch.manual_seed(0)
    model = Reverser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        ids = torch.randint(SYMBOLS, (64, LENGTH))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
        (loss + l1 * l1_penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}: cross-entropy {loss.item():.4f}, first block: {feed_forward_blocks(model)[0].stats}")
    with torch.no_grad():
        ids = torch.randint(SYMBOLS, (256, LENGTH))
        right = (model(ids).argmax(-1) == ids.flip(1)).float().mean().item()
    stats: list[Any] = [block.stats for block in feed_forward_blocks(model)]
    nonzeros = [one.nonzeros.float().mean().item() for one in stats]
    print(f"{right:.1%} right, non-zeros of {4 * WIDTH} by layer: {nonzeros}")
    return right, sum(nonzeros) / len(nonzeros)


if __name__ == "__main__":
    main()
