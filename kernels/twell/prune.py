"""`prune_silent`: removes neurons that fired for no token of a text, how likely they fire elsewhere, and what changes
then."""

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .huggingface import prefixes, rebuilt
from .memory import neuron_major
from .modules import SparseFeedForward, check_whole, feed_forward_blocks, pattern_layer, weights_of
from .ops import sparse_ffn
from .registry import DENSE
from .tuning.common import check_all_ran, check_inputs, checked_tokens, hooked
from .tuning.order import kept_count
from .tuning.saved import CONFIG_KEY, save_plans, unwrapped

MULTIPLE = 128  # of the width that is left: columns of an output tile of a dense product; half a tile of TwELL
SIZE = "intermediate_size"  # the setting of transformers' configurations


class HeldOut(NamedTuple):
    """Compares a model's outputs on other inputs before and after neurons were removed."""

    tokens: int
    firings: int  # of the neurons removed, over all tokens and blocks
    neurons: int  # removed that fired at least once
    logits_error: float  # relative, in the 2-norm
    same_top: float  # share of positions with the same largest logit
    loss: float | None  # before; None if the model returns no loss
    loss_after: float | None

    def __str__(self) -> str:
        text = (
            f"on {self.tokens} held-out tokens: {self.neurons} of them fired, {self.firings} times in total; logits "
            f"differ by {self.logits_error:.2g} (2-norm, relative); the largest is the same at {self.same_top:.2%} of "
            "positions"
        )
        if self.loss is None or self.loss_after is None:
            return text
        return f"{text}; loss {self.loss:.5f} before, {self.loss_after:.5f} after"


class Pruned(NamedTuple):
    """What `prune_silent` removed. neurons: how many each block has left, in layer order; of: how many it had; silent:
    how many had fired for none of the tokens."""

    neurons: tuple[int, ...]
    of: tuple[int, ...]
    silent: tuple[int, ...]
    tokens: int
    held_out: HeldOut | None = None

    @property
    def bound(self) -> float:
        """At 95% confidence, all neurons that fired for none of n independent tokens fire for less than this share of
        all tokens: that one of N neurons with a rate of p or more does not is at most N (1 - p)^n likely (the union
        bound), which is below 5% for p = log(20 N) / n. For a single neuron it is the rule of three, 3 / n."""
        return min(1.0, math.log(20 * sum(self.of)) / self.tokens)

    def __str__(self) -> str:
        removed = sum(self.of) - sum(self.neurons)
        if not any(self.silent):
            return f"each of {sum(self.of)} neurons fired for some of {self.tokens} tokens: none is removed"
        return (
            f"{removed} of {sum(self.of)} neurons are removed, of {sum(self.silent)} silent ones; none of them fired "
            f"for {self.tokens} tokens, so all fire for less than {self.bound:.2g} of all (95%, independent tokens)\n"
            + ("not measured on other inputs: give held_out" if self.held_out is None else str(self.held_out))
        )


@torch.no_grad()
def prune_silent(model: nn.Module, *inputs: Any, held_out: Any = None, **named: Any) -> Pruned:
    """Remove the neurons of each SparseFeedForward that fire for none of the tokens of these inputs, in place. The
    model is then an ordinary, smaller one, also as it is saved and loaded, and computes another function wherever one
    of them would have fired. The way back is your checkpoint.

    Runs `model(*inputs, **named)` once: give much and varied text. A width is a multiple of 128. Blocks
    of a transformers model keep one width, that of the block with the most neurons that fire, since its configuration
    has one `intermediate_size`, which is set to it. Other blocks each have their own. Create an optimizer afterwards.
    held_out: other inputs of the model (a mapping of named inputs, a tuple, or a single one), on which the firing of
    these neurons and the change of logits and loss are measured.

    Raises TypeError for a misspelled setting and for inputs in a dict that is not unpacked, and ValueError, and changes
    nothing, for inputs of a block without tokens or with NaN or Inf, for a model without blocks or one that does not
    run all of them, for DistributedDataParallel, for weights that are sharded, parametrized, have gradients or belong
    to other modules too, for a configuration that cannot describe the smaller model, and for held_out that gives no
    logits.
    """
    blocks = feed_forward_blocks(model)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no SparseFeedForward to prune; `sparsify` puts them there")
    check_inputs(prune_silent, model, inputs, named)
    check_whole("prune_silent", model, blocks)
    _check_own_weights(model, blocks)
    fired: dict[SparseFeedForward, Tensor] = {}
    tokens: Counter[SparseFeedForward] = Counter()

    def count(block: SparseFeedForward, x: Tensor) -> None:
        tokens[block] += checked_tokens(x, "prune_silent")
        _, stats = sparse_ffn(x, *weights_of(block), block.activation, DENSE, return_stats=True)
        fired[block] = stats.fired | fired.get(block, stats.fired)

    with hooked(blocks, count), torch.compiler.set_stance("force_eager"):
        model(*inputs, **named)
    check_all_ran(model, fired)
    configs = _configs(model, blocks)
    widths = {block: kept_count(neurons, MULTIPLE) for block, neurons in fired.items()}
    for _, described in configs:
        widths |= dict.fromkeys(described, max(widths[block] for block in described))
    kept = {}  # neurons by block, int64, in their order: all that fired, and the first of the others
    for block, width in widths.items():
        fired_first = fired[block].to(torch.int8).argsort(descending=True, stable=True)
        kept[block] = fired_first[:width].sort().values
    _check_rebuilt(model, configs, widths)
    before = None if held_out is None else _measured(model, held_out, kept)
    of, silent = ([len(block.up_proj.weight) for block in blocks], [int((~fired[block]).sum()) for block in blocks])
    for block, neurons in kept.items():
        _remove_others(block, neurons)
    for config, described in configs:
        setattr(config, SIZE, widths[described[0]])
    if hasattr(getattr(unwrapped(model), "config", None), CONFIG_KEY):
        save_plans(model)
    compared = None
    if before is not None:
        ((exact, loss), counts), (logits, loss_after) = before, _outputs(model, held_out)
        exact, logits = exact.double(), logits.double()
        error = (logits - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny)
        same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
        compared = HeldOut(*counts, float(error), float(same), loss, loss_after)
    return Pruned(tuple(widths[block] for block in blocks), tuple(of), tuple(silent), min(tokens.values()), compared)


def _check_own_weights(model: nn.Module, blocks: list[SparseFeedForward]) -> None:
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    names = {module: name for name, module in model.named_modules()}
    for block in blocks:
        for weight in (weight for weight in weights_of(block) if weight is not None):
            reasons = {
                "are no plain parameters": type(weight) is not nn.Parameter,
                "belong to another module too": uses[id(weight)] > 1,
                "have gradients (set them to None first)": weight.grad is not None,
            }
            if reason := next((reason for reason, holds in reasons.items() if holds), ""):
                raise ValueError(f"{names[block]} has weights that cannot be made smaller: they {reason}")


def _remove_others(block: SparseFeedForward, kept: Tensor) -> None:
    plan, l1_weight = block.plan, block.l1_weight
    place = {int(neuron): index for index, neuron in enumerate(kept.tolist())}
    leading = sum(neuron < plan.leading for neuron in place)
    screened = sum(neuron >= len(block.up_proj.weight) - plan.screened for neuron in place)
    indices = tuple(place[neuron] for neuron in plan.indices if neuron in place)
    block.plan, block.l1_weight, block._order = replace(plan, hot=0, screened=0), None, None
    with torch.inference_mode(False):  # what is made inside inference_mode could never be trained
        for linear in (block.gate_proj, block.up_proj, block.down_proj):
            if linear is None:
                continue
            old, by_column = linear.weight, linear is block.down_proj
            rows = old.detach().clone().index_select(1 if by_column else 0, kept.clone())
            if by_column:
                rows = neuron_major(rows)
            linear.weight = nn.Parameter(rows, requires_grad=old.requires_grad)
            linear.out_features, linear.in_features = rows.shape
        block.plan = replace(plan, hot=indices or leading, screened=screened)
        if l1_weight is not None:
            block.l1_weight = l1_weight[kept]


# --- the configuration ------------------------------------------------------------------------------------------------


class Described(NamedTuple):
    """A configuration of transformers, and the blocks that it describes."""

    config: Any
    blocks: list[SparseFeedForward]


def _configs(model: nn.Module, blocks: list[SparseFeedForward]) -> list[Described]:
    """The configuration that describes each block of a transformers model. Raises ValueError for one that does not
    give the width of its blocks."""
    names = {module: name for name, module in model.named_modules()}
    found: dict[int, Described] = {}  # by the configuration's id: they have no hash
    for block in blocks:
        configs = [vars(model.get_submodule(owner)).get("config") for owner in prefixes(names[block])]
        configs = [config for config in configs if hasattr(config, "to_dict")]
        if configs:
            config = configs[-1]
            if getattr(config, SIZE, None) != len(block.up_proj.weight):
                raise ValueError(
                    f"the configuration of {names[block]} has {SIZE}={getattr(config, SIZE, None)!r}, and the block "
                    f"{len(block.up_proj.weight)} neurons: what is saved could not be loaded"
                )
            found.setdefault(id(config), Described(config, [])).blocks.append(block)
    return list(found.values())


def _check_rebuilt(model: nn.Module, configs: list[Described], widths: Mapping[SparseFeedForward, int]) -> None:
    """Raises ValueError unless the changed configuration describes a model with the changed shapes."""
    root: Any = unwrapped(model)
    if not configs or not hasattr(type(root), "config_class"):
        return
    memo: dict[int, Any] = {}
    changed = copy.deepcopy(root.config, memo)
    for config, described in configs:
        setattr(memo.get(id(config), changed), SIZE, widths[described[0]])
    smaller = rebuilt(root, changed, "smaller configuration")
    shapes = {name: tuple(value.shape) for name, value in root.state_dict().items()}
    for name, module in root.named_modules():
        if isinstance(module, SparseFeedForward) and module in widths:
            for part, weight in zip(module._names, weights_of(module), strict=True):
                if weight is not None:
                    hidden = module.up_proj.weight.shape[1]
                    size = (hidden, widths[module]) if part == module._names[-1] else (widths[module], hidden)
                    shapes[f"{name}.{part}.weight"] = size
    expected = {name: tuple(value.shape) for name, value in smaller.state_dict().items()}
    if wrong := [name for name, shape in expected.items() if shapes.get(name) != shape]:
        raise ValueError(
            f"{SIZE} of the configuration is also that of other modules ({wrong[0]}): what is saved could not be loaded"
        )


# --- held-out text ----------------------------------------------------------------------------------------------------


_Outputs = tuple[Tensor, float | None]  # logits, and the loss if the model returns one


def _measured(
    model: nn.Module, held_out: Any, kept: Mapping[SparseFeedForward, Tensor]
) -> tuple[_Outputs, tuple[int, int, int]]:
    """The outputs before neurons are removed, and (tokens, how often these neurons fire, how many of them do). Raises
    ValueError for outputs without logits, and for inputs without tokens."""
    firings: dict[SparseFeedForward, Tensor] = {}
    tokens: Counter[SparseFeedForward] = Counter()

    def count(block: SparseFeedForward, x: Tensor) -> None:
        tokens[block] += checked_tokens(x, "held_out")
        rows = pattern_layer(block).weight
        removed = torch.ones(len(rows), dtype=torch.bool, device=rows.device).index_fill(0, kept[block], False)
        active = ~(F.linear(x.flatten(0, -2), rows[removed].to(x.dtype)) <= 0)  # NaN fires
        firings[block] = active.sum(0) + firings.get(block, 0)

    with hooked(list(kept), count):
        outputs = _outputs(model, held_out)
    total = sum(int(count.sum()) for count in firings.values())
    neurons = sum(int((count > 0).sum()) for count in firings.values())
    return outputs, (max(tokens.values()), total, neurons)


def _outputs(model: nn.Module, inputs: Any) -> _Outputs:
    with torch.compiler.set_stance("force_eager"):
        if isinstance(inputs, Mapping):
            outputs = model(**inputs)
        else:
            outputs = model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    if isinstance(outputs, Tensor):
        return outputs, None
    logits, loss = getattr(outputs, "logits", None), getattr(outputs, "loss", None)
    if not isinstance(logits, Tensor):
        raise ValueError(f"held_out needs a model that returns logits or one tensor, got {type(outputs).__name__}")
    return logits, None if loss is None else float(loss)
