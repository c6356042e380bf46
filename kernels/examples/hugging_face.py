"""Make a Hugging Face model sparse: ReLU, L1 term, training, autotune, save, load, generate.

    python kernels/examples/hugging_face.py [FOLDER]    # the model stays in FOLDER

A pretrained model has to be trained further after its activation was
replaced. This one is random and small, and only shows the steps.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from text import VOCABULARY, batches, decode, encode
from twell import autotune, feed_forward_blocks, l1_penalty, sparsify

CONFIG = Qwen3Config(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    bos_token_id=None,
    eos_token_id=None,
)


def mean_nonzeros(block: Any) -> float:
    """Non-zeros per token that the block counted in its latest forward."""
    return block.stats.nonzeros.float().mean().item()


def main(folder: str | Path, steps: int = 300, l1: float = 3e-3) -> None:
    """Train, save into the folder, and load again. l1: coefficient of the L1 term; see kernels/README.md."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIG)  # yours: AutoModelForCausalLM.from_pretrained(...)
    sparsify(model, activation="relu", keep_stats=True)  # SiLU becomes ReLU, in the configuration too
    model.train()  # from_pretrained leaves it in eval mode
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step, tokens in enumerate(batches(steps)):
        if step and step % 100 == 0:
            autotune(model, tokens, use_cache=False)  # in train mode: each block as trains faster by now
        loss = model(tokens, labels=tokens, use_cache=False).loss
        (loss + l1 * l1_penalty(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            layers = ", ".join(f"{mean_nonzeros(block):.1f}" for block in feed_forward_blocks(model))
            print(f"step {step}: cross-entropy {loss.item():.3f}, non-zeros of {CONFIG.intermediate_size}: {layers}")
    model.save_pretrained(folder)  # a plain Qwen3 with hidden_act="relu"

    model = AutoModelForCausalLM.from_pretrained(folder)
    sparsify(model)
    prompt = encode("def ")[None]
    print(autotune(model, prompt.repeat(8, 16)))  # dense or sparse, layer by layer; on a CPU always dense
    generated = model.generate(prompt, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(prompt))
    print(decode(generated[0]))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
