"""Sizes of the tiny random models of transformers that tests make, tokens for them, and one of them."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.arange(3, 25).view(2, 11)
SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(activation: str = "relu") -> LlamaForCausalLM:
    """The same weights each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act=activation)).eval()


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Of TOKENS."""
    return model(TOKENS, use_cache=False).logits
