"""`sparse_ffn` and the torch operators behind it.

The operators are functional and opaque, so torch.compile(fullgraph=True), activation checkpointing and DDP treat them
like any other operator: `torch.ops.twell`. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import hot_split, launch_cache, registry, torch_internals
from .backends import dense
from .capacity import CapacityGrowth, EntryCount
from .checks import PLAIN_TYPES, check_problem, is_fixed, is_inference, is_static, under_autocast, wants_gradients
from .finiteness import WEIGHTS
from .interface import RELU, Backend, Forward, Needs, Options, Weights, check_activation
from .launch_cache import LAUNCHES
from .memory import neuron_major

logger = logging.getLogger(__name__)

NAMESPACE = "twell"
STATS_MODES = ("full", "none")
CAPACITY = 128  # the paper's width of an ELL row in training


class FFNStats(NamedTuple):
    """The statistics of one call of `sparse_ffn`.

    nonzeros: int32, x's leading dimensions: active neurons of each token (gate after ReLU != 0; NaN counts as active).
    l1: scalar, mean over tokens of the sum over neurons of |h|; differentiable. float32 (float64 for float64 input);
        0 for zero tokens. This is the paper's L1 term before its coefficient. It sums over neurons, as the paper's
        coefficients imply (its equation also divides by N).
    fired: bool [N]: neurons active for at least one token.
    overflow: int64 scalar: how often a capacity of the sparse formats was exceeded. The result is exact anyway; if the
        count is high in every call, the backend does not suit these data.
    backend: the name of the backend that ran.

    Padding tokens count like any others. The first four are None with stats="none". Printing shows a summary and waits
    for the device.
    """

    nonzeros: Tensor | None
    l1: Tensor | None
    fired: Tensor | None
    overflow: Tensor | None
    backend: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._summary()}backend={self.backend!r})"

    def _summary(self) -> str:
        nonzeros, l1, fired, overflow = self[:4]
        if nonzeros is None or l1 is None or fired is None or overflow is None:
            return "no statistics, "
        tokens, neurons = nonzeros.numel(), fired.numel()
        try:
            mean = f"mean {nonzeros.double().mean().item():.1f}, largest {nonzeros.max().item()}" if tokens else "none"
            return (
                f"{tokens} tokens; non-zeros of {neurons} neurons: {mean}; {fired.sum().item()} fired; "
                f"l1={l1.item():.4g}, overflow={overflow.item()}, "
            )
        except RuntimeError:  # no values: of the meta device, or in a transformation or trace
            return f"{tokens} tokens, {neurons} neurons, without values, "


def check_stats(mode: str) -> None:
    """Raises ValueError for an unknown mode."""
    if mode not in STATS_MODES:
        raise ValueError(f"stats must be one of {', '.join(STATS_MODES)}, got {mode!r}")


def check_capacity(capacity: int) -> None:
    """Raises ValueError unless it is a whole number from 1 up."""
    if type(capacity) is not int or capacity < 1:
        raise ValueError(f"capacity must be a whole number of non-zeros per token, at least 1, got {capacity!r}")


def check_flag(name: str, value: bool) -> None:
    """Raises ValueError unless it is True or False."""
    if type(value) is not bool:
        raise ValueError(f"{name} must be True or False, got {value!r}")


def check_backup(backup: float | None) -> None:
    """Raises ValueError unless it is None or a number from 0 to 1."""
    if backup is not None and not (type(backup) in (int, float) and 0 <= backup <= 1):
        raise ValueError(f"backup must be None or a share of the tokens from 0 to 1, got {backup!r}")


def check_hot(hot: Tensor, device: torch.device) -> None:
    """Raises TypeError or ValueError unless this can be a tensor of neuron indices. Does not read the values."""
    if not isinstance(hot, Tensor) or hot.dtype != torch.int64:
        raise TypeError(f"hot must be an int64 tensor of neurons, got {getattr(hot, 'dtype', type(hot).__name__)}")
    if hot.ndim != 1 or hot.device != device:
        raise ValueError(f"hot must have one dimension and be on {device}, got {list(hot.shape)} on {hot.device}")


def check_distinct(hot: Tensor, neurons: int) -> None:
    """Raises ValueError unless these are distinct neurons. Reads the values: on a GPU, it waits for them."""
    distinct = hot.unique()
    if len(distinct) != len(hot) or ((distinct < 0) | (distinct >= neurons)).any():
        raise ValueError(f"hot must hold distinct neurons from 0 to {neurons - 1}")


def check_l1_weight(weight: Tensor, w_up: Tensor) -> None:
    """Raises TypeError or ValueError unless this can be the weight of each neuron in the L1 term: floating [N]."""
    if not isinstance(weight, Tensor) or not weight.dtype.is_floating_point:
        kind = getattr(weight, "dtype", type(weight).__name__)
        raise TypeError(f"l1_weight must be a floating tensor with a weight for each neuron, got {kind}")
    if weight.shape != w_up.shape[:1] or weight.device != w_up.device:
        wanted = f"must have the shape {list(w_up.shape[:1])} and be on {w_up.device}"
        raise ValueError(f"l1_weight {wanted}, got {list(weight.shape)} on {weight.device}")


def check_prefix(name: str, count: int, neurons: int) -> None:
    """Raises ValueError unless it is a whole number from 0 to the number of neurons."""
    if type(count) is not int or not 0 <= count <= neurons:
        raise ValueError(f"{name} must be a whole number of neurons from 0 to {neurons}, got {count!r}")


def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: str = RELU,
    backend: str = "auto",
    stats: str = "full",
    capacity: int = CAPACITY,
    hot: Tensor | None = None,
    hot_prefix: int = 0,
    backup: float | None = None,
    finite_weights: bool = False,
    l1_weight: Tensor | None = None,
) -> tuple[Tensor, FFNStats]:
    """The feed-forward block y = (a(x w_gate^T) * (x w_up^T)) w_down^T; w_gate=None: y = a(x w_up^T) w_down^T.

    x: [..., K], any leading dimensions, zero tokens included. w_gate, w_up: [N, K]; w_down: [K, N] (nn.Linear layout).
    All of one floating dtype on one device; strided inputs are fine. Under torch.autocast they are cast as F.linear
    casts its inputs. y has x's shape, and NaN and Inf appear in it as in plain torch; kernels/README.md has the
    exceptions.
    activation: a, "relu" or "relu2" (relu(z)^2, as in Primer, So et al. 2021). All count the same neurons as active:
    those where relu(z) != 0. The sparse backends keep relu(z) in x's dtype and square it in the accumulation dtype;
    "dense" rounds each step, as plain torch does.
    backend: "auto" or one of `available_backends()`. stats: "full", or "none" to skip them.
    capacity: the non-zeros per token (mean over the tokens) that a call with gradients can save. Only the sparse
    backends need it. Results do not depend on it: if it is exceeded, `overflow` in the statistics counts it, and the
    GPU backends compute the gradients of that call by dense products, which takes longer. To detect this, the backward
    waits for the forward. While a CUDA graph is captured it cannot wait: the graph's gradients are NaN if its capacity
    is exceeded.
    hot: int64 [H], distinct neurons that fire so often that dense products are faster for them (see `hot_neurons`).
    The result is exact for any choice of distinct neurons. On a GPU the values are not checked here, since that
    would wait for the device: if a neuron occurs twice or does not exist, results are wrong (NaN with hopper).
    `SparseFeedForward.hot` checks them on any device.
    hot_prefix: the number of leading neurons that are hot, an alternative to `hot` for neurons sorted by firing rate
    (`order_neurons`). Without gradients, both parts are slices of the weights, and nothing is copied.
    backup: the share of tokens, those with the most non-zeros, that a call with gradients computes and saves densely:
    the dense backup of the paper's hybrid format, which uses 1/8. These tokens need no capacity. None: the backend's
    default (reference: 1/8; GPU backends: no backup).
    finite_weights: the caller guarantees that no weight is Inf or NaN, now and in every replay of a CUDA graph or
    compiled program that contains this call. Calls without gradients then never read weights only to find such values,
    whose products with zeros are NaN. By default an eager call checks each version of the weights once, while captured
    and compiled calls check all weights every time, which takes most of their time if tokens are few.
    l1_weight: floating [N]: the weight of each neuron in `FFNStats.l1`, which is then the mean over tokens of
    sum_n l1_weight_n |h_n|; 0 exempts a neuron. None: 1 for all. It gets no gradient, and statistics with it need
    backend="dense".

    Returns (y, FFNStats). Raises TypeError or ValueError for inputs that do not match, and BackendUnavailable for a
    backend that was requested by name but cannot run.
    """
    return call(
        *(x, w_gate, w_up, w_down),
        activation=activation,
        backend=backend,
        stats=stats,
        capacity=capacity,
        hot=hot,
        hot_prefix=hot_prefix,
        backup=backup,
        finite_weights=finite_weights,
        growth=None,
        l1_weight=l1_weight,
    )


def call(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    *,
    activation: str,
    backend: str,
    stats: str,
    capacity: int,
    hot: Tensor | None,
    hot_prefix: int,
    backup: float | None,
    finite_weights: bool,
    growth: CapacityGrowth | None,
    l1_weight: Tensor | None = None,
) -> tuple[Tensor, FFNStats]:
    """`sparse_ffn`; growth: records the capacity that the backward would have needed (not under torch.compile)."""
    check_activation(activation)
    check_stats(stats)
    check_capacity(capacity)
    check_backup(backup)
    if l1_weight is not None:
        check_l1_weight(l1_weight, w_up)
        if stats == "none":
            l1_weight = None
        elif backend != registry.DENSE:
            raise ValueError(f'l1_weight needs backend="dense", got {backend!r}')
    inputs, key = (x, w_gate, w_up, w_down), None
    bypass = not torch.compiler.is_compiling() and _can_bypass_dispatcher(inputs)
    given_hot = checked = hot is not None or bool(hot_prefix)
    if given_hot:
        check_problem(x, w_gate, w_up, w_down)
        if hot is not None:
            check_hot(hot, x.device)
            if type(hot) is Tensor and hot.device.type == "cpu" and not torch.compiler.is_compiling():
                check_distinct(hot, w_up.shape[0])
        if hot_prefix:
            check_prefix("hot_prefix", hot_prefix, w_up.shape[0])
            if hot is not None:
                raise ValueError("hot neurons are given by hot or by hot_prefix, not by both")
        # Asked here for the sake of the paths below, which take a fraction of the time on the host.
        if bypass and stats == "none" and not wants_gradients(inputs):
            given_hot = not registry.needs_no_hot(backend, math.prod(x.shape[:-1]), w_up.shape[1])
            hot, hot_prefix = (hot, hot_prefix) if given_hot else (None, 0)
    alone = stats == "none" and bypass and not given_hot
    if alone and backend == registry.DENSE and is_inference(inputs, x.device.type):
        if not checked:
            check_problem(x, w_gate, w_up, w_down)
        return dense.inference(x, w_gate, w_up, w_down, activation), _DENSE_ALONE
    finite = bypass and backend != registry.DENSE and _known_finite(inputs, finite_weights)
    if alone:
        key = launch_cache.call_key(backend, activation, finite, inputs)
        if key is not None and (prepared := LAUNCHES.get(key)) is not None:
            return prepared.run(x), _no_stats(prepared.backend)
    if not checked:
        check_problem(x, w_gate, w_up, w_down)
    if given_hot:
        readable = x.device.type == "cpu" and not torch.compiler.is_compiling() and torch_internals.has_values()
        if readable and not bool(x.isfinite().all()):
            # Zeroed rows keep hot neurons out of the sparse part, but zero times Inf is NaN.
            hot, hot_prefix, given_hot = None, 0, False
    device, full = x.device, stats == "full"
    training = wants_gradients(inputs)
    # Graphs and compiled programs rely on what the caller guarantees, not on what is known of one version.
    finite = finite or (finite_weights and not training and not under_autocast(device.type))
    if under_autocast(device.type):
        x, w_gate, w_up = _as_autocast(x), None if w_gate is None else _as_autocast(w_gate), _as_autocast(w_up)
    intermediate, hidden = w_up.shape
    if torch.compiler.is_compiling():  # with dynamic=True the sizes of the weights are symbols; they must be numbers
        intermediate, hidden = operator.index(intermediate), operator.index(hidden)
    name = registry.resolve(
        backend, device.type, device.index, x.dtype, hidden, intermediate, w_gate is not None, training, activation
    )
    leading = x.shape[:-1]
    tokens = math.prod(leading)
    fixed = is_fixed(tokens) and is_static(tokens)
    if given_hot and not (full or training) and fixed and registry.has_few_tokens(name, tokens, hidden):
        return call(
            *inputs,
            activation=activation,
            backend=name,
            stats=stats,
            capacity=capacity,
            hot=None,
            hot_prefix=0,
            backup=backup,
            finite_weights=finite_weights,
            growth=None,
        )
    if w_down.dtype != x.dtype:  # under autocast; the cast copies anyway, so give the copy the backend's layout
        w_down = neuron_major(w_down, x.dtype) if registry.is_sparse(name) else w_down.to(x.dtype)
    if key is not None:
        launch_cache.prepare(key, name, activation, finite, x, Weights(w_gate, w_up, w_down.t()))
    x_MK = x if x.ndim == 2 else x.reshape(tokens, hidden)
    options = Options(full, training, capacity, backup, activation, finite)
    if hot_prefix and registry.is_sparse(name):
        if training or hot_prefix == intermediate:
            hot = torch.arange(hot_prefix, device=device)
        else:
            y_MK, found = _prefix_split(name, (x_MK, w_gate, w_up, w_down), hot_prefix, options)
            y = y_MK.reshape(x.shape)
            if found.nonzeros is None:
                return y, found
            # Not by _replace, whose result torch 2.11 cannot return from a compiled program.
            return y, FFNStats(found.nonzeros.reshape(leading), found.l1, found.fired, found.overflow, found.backend)
    results = _run(name, (x_MK, w_gate, w_up, w_down), hot, options, growth, l1_weight)
    y_MK, nonzeros_M, l1, fired_N, overflow = results
    y = y_MK if x.ndim == 2 else y_MK.reshape(x.shape)
    if not full or nonzeros_M is None:
        return y, _no_stats(name)
    return y, FFNStats(nonzeros_M if x.ndim == 2 else nonzeros_M.reshape(leading), l1, fired_N, overflow, name)


def _no_stats(name: str) -> FFNStats:
    return FFNStats(None, None, None, None, name)


def _prefix_split(name: str, inputs: "Inputs", count: int, options: Options) -> tuple[Tensor, FFNStats]:
    """y [M, K] and its statistics, without gradients: the first `count` neurons by dense products, the others by the
    sparse backend."""
    x, w_gate, w_up, w_down = inputs
    rest_gate = None if w_gate is None else w_gate[count:]
    y, rest = call(
        *(x, rest_gate, w_up[count:], w_down[:, count:]),
        activation=options.activation,
        backend=name,
        stats="full" if options.stats else "none",
        capacity=CAPACITY,
        hot=None,
        hot_prefix=0,
        backup=None,
        finite_weights=options.finite,
        growth=None,
    )
    whole = Forward(y, rest.nonzeros, rest.l1, rest.fired, rest.overflow)
    if rest.fired is not None:
        whole = whole._replace(fired=torch.cat((rest.fired.new_zeros(count), rest.fired)))
    plain = torch.compiler.is_compiling() or not _can_bypass_dispatcher(inputs)
    steps = None if plain else registry.get(name).hot
    own = Weights(None if w_gate is None else w_gate[:count], w_up[:count], w_down[:, :count].t())
    whole = hot_split.add_prefix(x, own, whole, options.activation, steps)
    return whole.y, FFNStats(whole.nonzeros, whole.l1, whole.fired, whole.overflow, name)


_DENSE_ALONE = _no_stats(registry.DENSE)

Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor]  # x, w_gate, w_up, w_down, as `sparse_ffn` takes them
Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _weights(inputs: Inputs) -> Weights:
    return Weights(inputs[1], inputs[2], inputs[3].t())


def _run(
    name: str,
    inputs: Inputs,
    hot: Tensor | None,
    options: Options,
    growth: CapacityGrowth | None,
    l1_weight: Tensor | None,
) -> Results:
    """(y, nonzeros, l1, fired, overflow) of x [M, K]; the statistics are meaningless unless requested."""
    transformed, traced = False, torch.compiler.is_compiling() or l1_weight is not None
    if not traced:
        forward_mode = torch_internals.in_forward_mode() and any(
            t is not None and torch_internals.has_tangent(t) for t in inputs
        )
        if not forward_mode and _can_bypass_dispatcher(inputs):
            if options.training:
                return _Direct.apply(*inputs, hot, name, *options, growth)
            return _computed(name, inputs, hot, options)[:5]
        transformed = forward_mode or torch_internals.is_transformed()
    if name == registry.DENSE and (traced or transformed):
        result = dense.traced(inputs[0], _weights(inputs), options.activation, l1_weight, stats=options.stats)
        return *result[:4], inputs[0].new_zeros((), dtype=torch.int64) if options.stats else None
    if transformed:
        raise NotImplementedError(
            f"sparse_ffn with backend {name!r} has neither a forward-mode derivative nor the transformations of "
            'torch.func (grad, vmap, ...): take backend="dense" there, or differentiate it with backward()'
        )
    return _forward_op(*inputs, hot, name, *options)[:5]


def _can_bypass_dispatcher(inputs: Inputs) -> bool:
    """Whether the dispatcher can be bypassed: no tensor subclass, mode, transformation or trace observes the operator.
    Calling its implementation directly takes at most half the host time, which bounds calls of few tokens."""
    x, w_gate, w_up, w_down = inputs
    return (
        type(x) in PLAIN_TYPES
        and type(w_up) in PLAIN_TYPES
        and type(w_down) in PLAIN_TYPES
        and (w_gate is None or type(w_gate) in PLAIN_TYPES)
        and not x.is_meta
        and not torch_internals.is_observed()
    )


def _known_finite(inputs: Inputs, guaranteed: bool) -> bool:
    """Whether an inference call can skip scanning its weights for Inf and NaN. (A cast may overflow to Inf.)"""
    if wants_gradients(inputs) or under_autocast(inputs[0].device.type):
        return False
    return guaranteed or WEIGHTS.known(inputs[1:])


def _as_autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the inputs of F.linear: everything but float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


# The operators. Optional results are empty tensors, since a schema has no optional outputs.

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "sparse_ffn(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? hot, str backend, bool stats,"
    " bool training, int capacity, float? backup, str activation, bool finite)"
    " -> (Tensor y, Tensor nonzeros, Tensor l1, Tensor fired, Tensor overflow, Tensor[] saved)"
)
_library.define(
    "sparse_ffn_backward(Tensor? dy, Tensor? dl1, Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? hot,"
    " Tensor[] saved, str backend, bool[] needs, str activation)"
    " -> (Tensor dx, Tensor dw_gate, Tensor dw_up, Tensor dw_down)"
)
_forward_op = getattr(torch.ops, NAMESPACE).sparse_ffn.default
_backward_op = getattr(torch.ops, NAMESPACE).sparse_ffn_backward.default


def _stats_like(x: Tensor, w_up: Tensor, stats: bool) -> tuple[Tensor, ...]:
    shapes = ((x.shape[0],), (), (w_up.shape[0],), ()) if stats else ((0,),) * 4
    dtypes = (torch.int32, torch.promote_types(x.dtype, torch.float32), torch.bool, torch.int64)
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _computed(backend: str, inputs: Inputs, hot: Tensor | None, options: Options) -> Forward:
    x, weights = inputs[0], _weights(inputs)
    if under_autocast(x.device.type):  # the backend says itself which dtype each product has
        with torch.autocast(x.device.type, enabled=False):
            return _computed(backend, inputs, hot, options)
    if hot is not None and not (options.stats or options.training) and registry.has_few_tokens(backend, *x.shape):
        hot = None  # `call` cannot tell in a program that is compiled for any number of tokens
    if hot is not None and (split := _split_backend(backend, hot)) is not None:
        result = hot_split.forward(split, x, weights, hot, options)
    else:
        result = registry.get(backend).forward(x, weights, options)
    if options.stats and result.overflow is None:
        return result._replace(overflow=x.new_zeros((), dtype=torch.int64))
    return result


def _split_backend(backend: str, hot: Tensor) -> Backend | None:
    """The backend, if its hot neurons are to be computed by dense products."""
    found = registry.get(backend)
    return found if hot.shape[0] and found.sparse else None


def _forward(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor | None,
    backend: str,
    stats: bool,
    training: bool,
    capacity: int,
    backup: float | None,
    activation: str,
    finite: bool,
) -> tuple[Any, ...]:
    inputs, options = (x, w_gate, w_up, w_down), Options(stats, training, capacity, backup, activation, finite)
    return _as_outputs(_computed(backend, inputs, hot, options), x, w_up, stats)


def _as_outputs(result: Forward, x: Tensor, w_up: Tensor, stats: bool) -> tuple[Any, ...]:
    return (result.y, *(result[1:5] if stats else _stats_like(x, w_up, stats)), list(result.saved))


def _forward_fake(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor | None,
    backend: str,
    stats: bool,
    training: bool,
    capacity: int,
    backup: float | None,
    activation: str,
    finite: bool,
) -> tuple[Any, ...]:
    saved: Sequence[Tensor] = ()
    weights, options = Weights(w_gate, w_up, w_down.t()), Options(stats, training, capacity, backup, activation, finite)
    if training and hot is not None and (split := _split_backend(backend, hot)) is not None:
        saved = hot_split.saved_like(split, x, weights, hot, options)
    elif training:
        saved = registry.get(backend).saved_like(x, weights, options)
    return (x.new_empty(x.shape), *_stats_like(x, w_up, stats), list(saved))


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    x, w_gate, w_up, w_down, hot, ctx.backend, stats, *_, ctx.activation, _finite = inputs
    _, nonzeros, l1, fired, overflow, saved = output
    # Without this, autograd would create a zero gradient for each saved tensor.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(nonzeros, fired, overflow, *saved, *(() if stats else (l1,)))
    ctx.save_for_backward(x, w_gate, w_up, w_down, hot, *saved)


def _differentiate(ctx: Any, dy: Tensor | None, d_nonzeros: None, dl1: Tensor | None, *others: None) -> tuple:
    return *_gradients(_backward_op, ctx, dy, dl1), *(None,) * 8


def _gradients(backward: Callable[..., Any], ctx: Any, dy: Tensor | None, dl1: Tensor | None) -> tuple:
    x, w_gate, w_up, w_down, hot, *saved = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    gradients = backward(dy, dl1, x, w_gate, w_up, w_down, hot, saved, ctx.backend, needs, ctx.activation)
    return tuple(g if needed else None for g, needed in zip(gradients, needs, strict=True))


class _Direct(torch.autograd.Function):
    """The operator with its derivative, for calls that bypass the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *inputs, growth = arguments
        x, w_gate, w_up, w_down, hot, backend, *options = inputs
        result = _computed(backend, (x, w_gate, w_up, w_down), hot, Options(*options))
        output = _as_outputs(result, x, w_up, options[0])
        _setup_context(ctx, inputs, output)
        ctx.count = result.saved_entries
        if growth is not None and result.saved_entries is not None:
            growth.opened(result.saved_entries)
        return output[:5]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_nonzeros: None, dl1: Tensor | None, *others: None) -> Any:
        # With create_graph the gradients need a derivative; the operator's raises a clear error.
        backward = _backward_op if torch.is_grad_enabled() else functools.partial(_backward, count=ctx.count)
        return *_gradients(backward, ctx, dy, dl1), *(None,) * 9


def _backward(
    dy: Tensor | None,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor | None,
    saved: Sequence[Tensor],
    backend: str,
    needs: Sequence[bool],
    activation: str,
    count: EntryCount | None = None,
) -> tuple[Tensor, ...]:
    device_type = x.device.type
    if under_autocast(device_type):  # the backend says itself which dtype each product has
        with torch.autocast(device_type, enabled=False):
            return _backward(dy, dl1, x, w_gate, w_up, w_down, hot, saved, backend, needs, activation, count)
    inputs, wanted = (x, w_gate, w_up, w_down), Needs(*needs)
    weights = _weights(inputs)
    dy = x.new_zeros(x.shape) if dy is None else dy
    if hot is not None and (split := _split_backend(backend, hot)) is not None:
        found = hot_split.backward(split, dy, dl1, x, weights, hot, saved, wanted, activation)
    else:
        found = registry.get(backend).backward(dy, dl1, x, weights, saved, wanted, activation)
    # Asked only now, so that the device has work while this waits for the forward.
    if _exceeded(backend, saved, count):
        found = dense.gradients(dy, dl1, x, weights, wanted, activation)  # of the whole block, hot neurons included
    gradients = found._replace(down=None if found.down is None else found.down.t())
    return tuple(
        x.new_empty(0) if g is None or t is None else _laid_out(g, t) for g, t in zip(gradients, inputs, strict=True)
    )


def _exceeded(backend: str, saved: Sequence[Tensor], count: EntryCount | None) -> bool:
    """Whether a forward had more non-zeros than capacity, so that its saved tensors are incomplete. Waits for it."""
    needed_capacity = registry.get(backend).needed_capacity
    if needed_capacity is None:
        return False
    needed = needed_capacity(saved, count)
    if count is not None and count.growth is not None:
        count.growth.closed(count, needed)
    if needed is not None:
        _log_exceeded(backend, needed)
    return needed is not None


_logged_backends: set[str] = set()


def _log_exceeded(backend: str, needed: int) -> None:
    if backend not in _logged_backends:
        _logged_backends.add(backend)
        logger.warning(
            "backend %s: a call had more non-zeros than its capacity, which would have to be %d. Its gradients are "
            "computed by dense products: exact, but slower. Further such calls are not logged",
            *(backend, needed),
        )


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """With the strides of `like`, or contiguous if that has gaps, so that a parameter takes it without a copy."""
    if gradient.stride() == like.stride():
        return gradient
    return torch.empty_like(like).copy_(gradient)


def _backward_fake(
    dy: Tensor | None,
    dl1: Tensor | None,
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    hot: Tensor | None,
    saved: Sequence[Tensor],
    backend: str,
    needs: Sequence[bool],
    activation: str,
) -> tuple[Tensor, ...]:
    inputs = (x, w_gate, w_up, w_down)
    return tuple(
        torch.empty_like(t) if t is not None and needed else x.new_empty(0)
        for t, needed in zip(inputs, needs, strict=True)
    )


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("sparse_ffn has a first derivative only: differentiate it without create_graph=True")


_library.impl("sparse_ffn", _forward, "CompositeExplicitAutograd")
_library.impl("sparse_ffn_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::sparse_ffn", _forward_fake, lib=_library)
torch.library.register_fake(f"{NAMESPACE}::sparse_ffn_backward", _backward_fake, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::sparse_ffn", _differentiate, setup_context=_setup_context, lib=_library)
torch.library.register_autograd(f"{NAMESPACE}::sparse_ffn_backward", _no_second_derivative, lib=_library)
