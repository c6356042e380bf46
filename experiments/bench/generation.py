"""The alternatives for greedy generation by a whole language model, checked against float32.

Shapes: B sequences, P prompt tokens, T new tokens, S = P + T, K hidden, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CompileConfig, PreTrainedModel, StaticCache

from experiments.bench.decoder import Decoder, chosen_backends, evenly_spread, exact_copy, no_tf32
from experiments.bench.feedforward import unavailable
from experiments.models.llama import ReluFeedForward, feed_forward_blocks
from experiments.run.torch_internals import CompilationFailed, raise_recompile_limit
from experiments.run.values import in_one_line
from experiments.timing.compare import REASON_LENGTH, Absent, Candidate, check
from experiments.timing.measure import Measurement, device_time
from experiments.timing.plans import AUTO, BY_LAYER, named, plan_of
from twell import autotune
from twell import feed_forward_blocks as sparse_blocks
from twell.registry import BackendUnavailable
from twell.testing import relative_error, tolerance
from twell.tuning import Tuning

log = logging.getLogger(__name__)

# How `generate` compiles a decoding step: what transformers takes by itself, with CUDA graphs.
DECODING_STEP = CompileConfig(mode="reduce-overhead")
PAD = 0  # never generated: all sequences have the same length


class Generator:
    """A model that continues each prompt by exactly `new_tokens` tokens, always the most likely one.

    Args:
        model: a causal language model of transformers.
        prompt_BP: int64 token ids.
        new_tokens: T.
        cache: of static size, for P + T tokens, with which transformers compiles the decoding step on a GPU. None: a
            cache that grows, and nothing is compiled.
    """

    def __init__(self, model: PreTrainedModel, prompt_BP: Tensor, new_tokens: int, cache: StaticCache | None):
        self.model, self.prompt = model, prompt_BP
        self._new_tokens, self._cache = new_tokens, cache

    def __call__(self) -> Tensor:
        """The new tokens, int64 [B, T]."""
        return self.generate()[:, self.prompt.shape[1] :]

    @torch.no_grad()
    def hidden_states(self, sequences: Sequence[int]) -> Tensor:
        """Last hidden states of these sequences' prompts: [len(sequences), P, K]."""
        body: Any = self.model.base_model
        return body(self.prompt[sequences], use_cache=False).last_hidden_state

    def tensors(self) -> list[Tensor]:
        """Tensors kept between calls: weights, buffers, and a cache of static size."""
        layers: list[Any] = [] if self._cache is None else self._cache.layers
        kept = [tensor for layer in layers if layer.is_initialized for tensor in (layer.keys, layer.values)]
        return [*self.model.parameters(), *self.model.buffers(), *kept]

    def generate(self, **options: Any) -> Any:
        """Prompt and new tokens, int64 [B, S], or what other options of transformers' `generate` ask for."""
        model: Any = self.model
        if self._cache is not None:
            # The same cache in every call. A new one, as `cache_implementation="static"` makes, may have other
            # addresses, and then the CUDA graph would be recorded again.
            self._cache.reset()
            options |= {"past_key_values": self._cache, "compile_config": DECODING_STEP}
        return model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            do_sample=False,
            num_beams=1,
            use_cache=True,
            max_new_tokens=self._new_tokens,
            min_new_tokens=self._new_tokens,
            pad_token_id=PAD,
            **options,
        )


def why_not_compiled(device: torch.device) -> str:
    """Why `generate` does not compile the decoding step on this device; empty if it does."""
    return "" if device.type == "cuda" else "transformers compiles the decoding step on GPUs only"


class Generation:
    """Greedy generation by a language model, with any backend in its feed-forward blocks.

    Each alternative is a model of its own around shared weights: its blocks never change, so what torch.compile made of
    it and the CUDA graphs that were recorded stay valid while others run.

    Args:
        model: a causal language model of transformers with our blocks.
        prompt_BP: int64 token ids, P >= 2.
        new_tokens: T.
    """

    def __init__(self, model: PreTrainedModel, prompt_BP: Tensor, new_tokens: int):
        torch.compiler.reset()  # torch counts compilations over all models (see experiments.bench.feedforward)
        raise_recompile_limit()
        self._prompt, self._new_tokens = prompt_BP, new_tokens
        self._model = _sharing(model)
        self._sparse = bool(sparse_blocks(model))  # SiLU blocks are always dense
        for block in feed_forward_blocks(self._model):
            block.keep_stats = False
        for block in sparse_blocks(self._model):
            block.plan = "dense"
            if isinstance(block, ReluFeedForward):
                block.in_graph = True
        self._static_cache = StaticCache(config=model.config, max_cache_len=prompt_BP.shape[1] + new_tokens)

    @cached_property
    def as_it_comes(self) -> Generator:
        """Dense products, nothing compiled."""
        return self._generator(self._with("dense"), compiled=False)

    @cached_property
    def tokens(self) -> Tensor:
        """Prompt and new tokens of the model as it comes: int64 [B, S]."""
        return torch.cat([self._prompt, self.as_it_comes()], dim=1)

    def mean_nonzeros(self) -> float:
        """Per token, over all layers and over prompt and new tokens."""
        nonzeros = Decoder(_sharing(self._model), self.tokens).nonzeros()
        return sum(nonzeros) / len(nonzeros)

    def alternatives(self, dense: Sequence[str], backends: Sequence[str]) -> list[Candidate | Absent]:
        """Checked candidates. Each backend is measured in the forms that dense products are: eager, compiled, or both.

        Args:
            dense: dense_eager and dense_compiled; empty: backends eager.
            backends: of `kernels`, or AUTO.

        Raises:
            CheckFailed: when hidden states or logits are off by more than rounding.
        """
        checker, device = _Checker(self.as_it_comes, evenly_spread(len(self._prompt))), self._prompt.device

        def alternative(
            name: str, plan: str, make: Callable[[], PreTrainedModel], compiled: bool, reason: str = ""
        ) -> Candidate | Absent:
            if reason := reason or (why_not_compiled(device) if compiled else ""):
                return Absent(name, plan, reason)
            try:
                generator = self._generator(make(), compiled=compiled)
                error, new_tokens = checker.check(name, generator)
            except (BackendUnavailable, CompilationFailed) as failure:
                return Absent(name, plan, in_one_line(failure, REASON_LENGTH))
            same = (new_tokens == self.tokens[:, self._prompt.shape[1] :]).double().mean().item()
            log.info("%s: %.1f%% of its tokens are those of dense_eager", name, 100 * same)
            known = {"same_tokens": Measurement(same, n=1)}
            if device.type == "cuda":
                known["device_time"] = device_time(generator, device)
            return Candidate(name, plan, generator, error, inputs=generator.tensors(), known=known)

        plain = partial(self._with, "dense")
        found = [alternative(name, "dense", plain, name == "dense_compiled") for name in dense]
        for name in backends if self._sparse else []:
            make = partial(self._with, name)
            if name == AUTO:
                model, choices = self._tuned()
                make, plan = partial(_sharing, model), BY_LAYER
                shown, reason = chosen_backends(choices, lambda chosen: chosen.backends)
            else:
                shown, plan, reason = name, plan_of(name, training=False), unavailable(name, device)
            for compiled in [form == "dense_compiled" for form in dense or ["dense_eager"]]:
                found.append(alternative(named(shown, compiled=compiled), plan, make, compiled, reason))
        return found

    def _generator(self, model: PreTrainedModel, *, compiled: bool) -> Generator:
        return Generator(model, self._prompt, self._new_tokens, self._static_cache if compiled else None)

    def _with(self, backend: str) -> PreTrainedModel:
        model = _sharing(self._model)
        for block in sparse_blocks(model):
            block.plan = backend
        return model

    def _tuned(self) -> tuple[PreTrainedModel, Tuning]:
        """The model after `autotune` with the prompts, which also chooses what decoding steps use. Its blocks have
        weights of their own, whose neurons may be put in another order."""
        model: Any = _sharing(self._model)
        for block in sparse_blocks(model):
            for linear in (block.gate_proj, block.up_proj, block.down_proj):
                if linear is not None:
                    linear.weight = nn.Parameter(linear.weight.detach().clone())
        return model, autotune(model, self._prompt, use_cache=False)


class _Checker:
    """Compares what an alternative computes with float32, or float64 where the model is in float32: the hidden states
    of prompts, and the logits of every new token, given the tokens before it that the alternative itself generated. So
    decoding steps are checked too.

    Args:
        plain: dense products in the model's precision: twice its error is allowed, and rounding.
        sequences: of the batch, to compare.
    """

    def __init__(self, plain: Generator, sequences: Sequence[int]):
        self._exact: Any = exact_copy(plain.model)
        self._sequences = sequences
        with no_tf32():
            self._hidden_CPK = Generator(self._exact, plain.prompt, 0, None).hidden_states(sequences)
        errors, _ = self._errors(plain)
        self._allowed = {what: tolerance(error, plain.model.dtype) for what, error in errors.items()}

    def check(self, name: str, generator: Generator) -> tuple[float, Tensor]:
        """Largest error of the generator, and its tokens [B, T].

        Raises:
            CheckFailed: when an error is more than rounding explains.
        """
        errors, tokens_BT = self._errors(generator)
        return max(check(f"{name}, {what}", error, self._allowed[what]) for what, error in errors.items()), tokens_BT

    def _errors(self, generator: Generator) -> tuple[dict[str, float], Tensor]:
        hidden_CPK = generator.hidden_states(self._sequences)
        made = generator.generate(return_dict_in_generate=True, output_logits=True)
        logits_BTV = torch.stack(made.logits, dim=1)  # that the new tokens are the largest of
        new_tokens = logits_BTV.shape[1]
        # Each given all tokens before it.
        with torch.no_grad(), no_tf32():
            calls = [self._exact(ids_S[None, :-1], use_cache=False) for ids_S in made.sequences[self._sequences]]
        exact_CTV = torch.cat([call.logits[:, -new_tokens:] for call in calls])
        errors = {
            "hidden states of the prompt": relative_error(hidden_CPK, self._hidden_CPK),
            "logits of the new tokens": relative_error(logits_BTV[self._sequences], exact_CTV),
        }
        return errors, made.sequences[:, -new_tokens:]


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    """The model with modules of its own around the same parameters and buffers."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
