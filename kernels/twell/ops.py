"""`sparse_ffn` and the torch operators behind it.

The operators are functional and opaque, so torch.compile(fullgraph=True), activation checkpointing and DDP treat them
like any other operator: `torch.ops.twell`. Shapes: M tokens, K hidden, N intermediate.
"""

import functools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import hot_split, launch_cache, registry, torch_internals
from .backends import dense
from .capacity import CapacityGrowth, EntryCount
from .checks import (
    PLAIN_TYPES,
    check_l1_weight,
    check_problem,
    is_fixed,
    is_inference,
    is_static,
    under_autocast,
    wants_gradients,
)
from .interface import RELU, Forward, Needs, Options, Weights, check_activation
from .launch_cache import LAUNCHES
from .memory import SCREENS_FROM, neuron_major
from .plan import CAPACITY, Plan

logger = logging.getLogger(__name__)

NAMESPACE = "twell"


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

    Padding tokens count like any others. Printing shows a summary and waits for the device.
    """

    nonzeros: Tensor
    l1: Tensor
    fired: Tensor
    overflow: Tensor
    backend: str

    def __repr__(self) -> str:
        nonzeros, l1, fired, overflow, backend = self
        tokens, neurons = nonzeros.numel(), fired.numel()
        try:
            mean = f"mean {nonzeros.double().mean().item():.1f}, largest {nonzeros.max().item()}" if tokens else "none"
            values = (
                f"non-zeros of {neurons} neurons: {mean}; {fired.sum().item()} fired; l1={l1.item():.4g}, "
                f"overflow={overflow.item()}"
            )
        except RuntimeError:  # no values: of the meta device, or in a transformation or trace
            values = f"{neurons} neurons, without values"
        return f"{type(self).__name__}({tokens} tokens; {values}, backend={backend!r})"


Inputs = tuple[Tensor, Tensor | None, Tensor, Tensor]  # x, w_gate, w_up, w_down, as `sparse_ffn` takes them


class Operands(NamedTuple):
    """The tensors of a call: its inputs, with x [M, K]; the hot neurons by index; the weights of the L1 term, [N]."""

    x: Tensor
    w_gate: Tensor | None
    w_up: Tensor
    w_down: Tensor
    hot: Tensor | None
    l1_weight: Tensor | None

    @property
    def weights(self) -> Weights:
        return Weights(self.w_gate, self.w_up, self.w_down.t(), self.l1_weight)


class Call(NamedTuple):
    """What a call is given beside its inputs. capacity: as in `Options`; hot: the plan's hot neurons where they are
    given by index, int64 [H]; growth: records the capacity that the backward would have needed (not under
    torch.compile)."""

    plan: Plan
    activation: str = RELU
    stats: bool = False
    capacity: int = CAPACITY
    hot: Tensor | None = None
    l1_weight: Tensor | None = None
    growth: CapacityGrowth | None = None


@overload
def sparse_ffn(
    x: Tensor, w_gate: Tensor | None, w_up: Tensor, w_down: Tensor, activation: str = ..., plan: Plan | str = ...
) -> Tensor: ...
@overload
def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    activation: str = ...,
    plan: Plan | str = ...,
    *,
    return_stats: Literal[True],
    l1_weight: Tensor | None = ...,
) -> tuple[Tensor, FFNStats]: ...
@overload
def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    activation: str = ...,
    plan: Plan | str = ...,
    return_stats: bool = ...,
    l1_weight: Tensor | None = ...,
) -> Tensor | tuple[Tensor, FFNStats]: ...
def sparse_ffn(
    x: Tensor,
    w_gate: Tensor | None,
    w_up: Tensor,
    w_down: Tensor,
    activation: str = RELU,
    plan: Plan | str = "auto",
    return_stats: bool = False,
    l1_weight: Tensor | None = None,
) -> Tensor | tuple[Tensor, FFNStats]:
    """The feed-forward block y = (a(x w_gate^T) * (x w_up^T)) w_down^T; w_gate=None: y = a(x w_up^T) w_down^T.

    x: [..., K], any leading dimensions, zero tokens included. w_gate, w_up: [N, K]; w_down: [K, N] (nn.Linear layout).
    All of one floating dtype on one device; strided inputs are fine. Under torch.autocast they are cast as F.linear
    casts its inputs. y has x's shape, and NaN and Inf of x appear in it as in plain torch; kernels/README.md has the
    exceptions.
    activation: a, "relu" or "relu2" (relu(z)^2, as in Primer, So et al. 2021). All count the same neurons as active:
    those where relu(z) != 0. The sparse backends keep relu(z) in x's dtype and square it in the accumulation dtype;
    "dense" rounds each step, as plain torch does.
    plan: a `Plan`, or the name of a backend. Results and gradients do not depend on it.
    l1_weight: floating [N]: the weight of each neuron in `FFNStats.l1`, which is then the mean over tokens of
    sum_n l1_weight_n |h_n|; 0 exempts a neuron. None: 1 for all. It gets no gradient.

    Returns y; with return_stats=True (y, FFNStats). Raises TypeError or ValueError for inputs that do not match, and
    BackendUnavailable for a backend that was requested by name but cannot run.
    """
    check_activation(activation)
    plan = Plan.of(plan)
    hot = None
    if plan.indices:
        check_problem(x, w_gate, w_up, w_down)
        plan.check_fits(w_up.shape[0])
        hot = torch.tensor(plan.indices, device=w_up.device)
    call = Call(plan, activation, return_stats, plan.capacity or CAPACITY, hot, l1_weight)
    y, stats = compute((x, w_gate, w_up, w_down), call)
    return y if stats is None else (y, stats)


def compute(inputs: Inputs, call: Call) -> tuple[Tensor, FFNStats | None]:
    """(y, its statistics if they are asked for)."""
    direct = not torch.compiler.is_compiling() and _can_bypass_dispatcher(inputs)
    if direct and not call.stats and is_inference(inputs, inputs[0].device.type):
        y, key = _at_once(inputs, call)
        if y is not None:
            return y, None
    else:
        key = None
    check_problem(*inputs)
    if call.plan.of_sorted:
        call.plan.check_fits(inputs[2].shape[0])
    if call.stats and call.l1_weight is not None:
        check_l1_weight(call.l1_weight, inputs[2])
    x, w_gate, w_up, w_down = inputs
    plan, training, device = call.plan, wants_gradients(inputs), x.device
    if under_autocast(device.type):
        x, w_gate, w_up = _as_autocast(x), None if w_gate is None else _as_autocast(w_gate), _as_autocast(w_up)
    intermediate, hidden = w_up.shape
    if torch.compiler.is_compiling():  # with dynamic=True the sizes of the weights are symbols; they must be numbers
        intermediate, hidden = operator.index(intermediate), operator.index(hidden)
    tokens = math.prod(x.shape[:-1])
    requested = plan.backend_for(tokens) if plan.up_to and is_fixed(tokens) else plan.backend
    sizes = hidden, intermediate
    name = registry.resolve(requested, device, x.dtype, *sizes, w_gate is not None, training, call.activation)
    if w_down.dtype != x.dtype:  # under autocast; the cast copies anyway, so give the copy the backend's layout
        w_down = neuron_major(w_down, x.dtype) if registry.is_sparse(name) else w_down.to(x.dtype)
    if key is not None:
        launch_cache.prepare(key, name, call.activation, x, Weights(w_gate, w_up, w_down.t()))
    x_MK = x if x.ndim == 2 else x.reshape(tokens, hidden)
    l1_weight = None
    if call.stats and call.l1_weight is not None:
        l1_weight = call.l1_weight.detach().to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    hot, leading = _hot_of(name, x_MK, intermediate, call, training)
    options = Options(call.stats, training, call.capacity, plan.backup, call.activation, plan.screened, leading)
    operands = Operands(x_MK, w_gate, w_up, w_down, hot, l1_weight)
    y_MK, nonzeros_M, l1, fired_N, overflow = _run(name, operands, options, call.growth)
    y = y_MK if x.ndim == 2 else y_MK.reshape(x.shape)
    if not call.stats or nonzeros_M is None or l1 is None or fired_N is None or overflow is None:
        return y, None
    return y, FFNStats(nonzeros_M if x.ndim == 2 else nonzeros_M.reshape(x.shape[:-1]), l1, fired_N, overflow, name)


def _at_once(inputs: Inputs, call: Call) -> tuple[Tensor | None, tuple | None]:
    """(y, None) of an inference call that is dense or was prepared before, which takes a fraction of the time on the
    host. Else (None, a key under which to prepare the call for its next repetition, or None)."""
    x, w_gate, w_up, w_down = inputs
    plan, tokens = call.plan, math.prod(x.shape[:-1])
    backend = plan.backend_for(tokens) if plan.up_to else plan.backend
    if plan.hot or plan.screened or backend == registry.DENSE:
        check_problem(x, w_gate, w_up, w_down)
        if plan.of_sorted:
            plan.check_fits(w_up.shape[0])
    if backend == registry.DENSE:
        return dense.inference(x, w_gate, w_up, w_down, call.activation), None
    if plan.screened and tokens >= SCREENS_FROM:
        return None, None  # what is prepared does not screen
    if plan.hot and not registry.has_few_tokens(backend, tokens, w_up.shape[1]):
        return _with_prefix_at_once(backend, inputs, call), None
    key = launch_cache.call_key(backend, call.activation, inputs)
    prepared = None if key is None else LAUNCHES.get(key)
    return (None, key) if prepared is None else (prepared(x), None)


def _with_prefix_at_once(backend: str, inputs: Inputs, call: Call) -> Tensor | None:
    """y of a call with leading hot neurons where that of the others was prepared before."""
    x, count = inputs[0], call.plan.leading
    if not count or backend == registry.AUTO or not launch_cache.is_prepared_for(x):
        return None
    x_MK = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    others, leading = _split((x_MK, *inputs[1:]), count)
    y_MK, _ = _at_once(others, Call(Plan.of(backend), call.activation))
    if y_MK is None:
        return None
    hot_split.add_prefix(registry.get(backend), x_MK, leading, Forward(y_MK), call.activation)
    return y_MK if x.ndim == 2 else y_MK.reshape(x.shape)


def _split(inputs: Inputs, count: int) -> tuple[Inputs, Weights]:
    """(x and the weights of all neurons but the leading ones; the weights of those)."""
    x, w_gate, w_up, w_down = inputs
    gate, others = (None, None) if w_gate is None else (w_gate[:count], w_gate[count:])
    return (x, others, w_up[count:], w_down[:, count:]), Weights(gate, w_up[:count], w_down[:, :count].t())


def _hot_of(name: str, x: Tensor, neurons: int, call: Call, training: bool) -> tuple[Tensor | None, int]:
    """The hot neurons that this backend leaves to dense products: (by index, as a number of leading ones), at most one
    of them."""
    prefix = call.plan.leading
    if (call.hot is None and not prefix) or not registry.is_sparse(name):
        return None, 0
    compiling = torch.compiler.is_compiling()
    if x.device.type == "cpu" and not compiling and torch_internals.has_values() and not bool(x.isfinite().all()):
        return None, 0  # zeroed rows keep hot neurons out of the sparse part, but zero times Inf is NaN
    tokens, hidden = x.shape
    for_y_alone = not (call.stats or training) and is_fixed(tokens) and is_static(tokens)
    if for_y_alone and registry.has_few_tokens(name, tokens, hidden):
        return None, 0
    if prefix and (training or prefix == neurons):
        return torch.arange(prefix, device=x.device), 0
    return call.hot, prefix


def _prefix_split(name: str, operands: Operands, options: Options) -> Forward:
    """The forward of x [M, K] without gradients: the leading neurons by dense products, the others by the sparse
    backend."""
    count, l1_weight = options.leading, operands.l1_weight
    others, leading = _split(operands[:4], count)
    of_prefix, of_others = (None, None) if l1_weight is None else l1_weight.tensor_split([count])
    plan = Plan(name, screened=options.screened) if options.screened else Plan.of(name)  # that one exists
    y, rest = compute(others, Call(plan, options.activation, options.stats, l1_weight=of_others))
    whole = Forward(y)
    if rest is not None:
        fired = torch.cat((rest.fired.new_zeros(count), rest.fired))
        whole = Forward(y, rest.nonzeros, rest.l1, fired, rest.overflow)
    leading = leading._replace(l1=of_prefix)
    return hot_split.add_prefix(registry.get(name), operands.x, leading, whole, options.activation)


Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _run(name: str, operands: Operands, options: Options, growth: CapacityGrowth | None) -> Results:
    """(y, nonzeros, l1, fired, overflow) of x [M, K]; the statistics are meaningless unless requested."""
    transformed, traced, compiling = False, False, torch.compiler.is_compiling()
    if not compiling:
        inputs = operands[:4]
        forward_mode = torch_internals.in_forward_mode() and any(
            t is not None and torch_internals.has_tangent(t) for t in inputs
        )
        if not forward_mode and _can_bypass_dispatcher(inputs):
            if options.training:
                return _Direct.apply(*operands, name, options, growth)
            return _computed(name, operands, options)[:5]
        transformed = forward_mode or torch_internals.is_transformed()
        traced = torch.jit.is_tracing()
    if name == registry.DENSE and (transformed or traced or (compiling and not _makes_h_at_once(operands, options))):
        result = dense.traced(operands.x, operands.weights, options.activation, stats=options.stats)
        return *result[:4], operands.x.new_zeros((), dtype=torch.int64) if options.stats else None
    if transformed:
        raise NotImplementedError(
            f"sparse_ffn with backend {name!r} has neither a forward-mode derivative nor the transformations of "
            'torch.func (grad, vmap, ...): take plan="dense" there, or differentiate it with backward()'
        )
    return _forward_op(*operands, name, *options)[:5]


def _makes_h_at_once(operands: Operands, options: Options) -> bool:
    """Whether a compiled program is faster if it leaves dense products to the operator, where one kernel makes h. One
    for any number of tokens does not: to ask would split its range, an error where `mark_dynamic` was given one."""
    x, w_gate, w_up, *_ = operands
    if options.training or options.stats or not (is_fixed(x.shape[0]) and is_static(x.shape[0])):
        return False
    return x.is_cuda and dense.makes_h_at_once(x, w_gate, w_up, options.activation)


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


def _as_autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the inputs of F.linear: everything but float64."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(tensor.device.type))


# The operators. Optional results are empty tensors, since a schema has no optional outputs.

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "sparse_ffn(Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? hot, Tensor? l1_weight,"
    " str backend, bool stats, bool training, int capacity, float backup, str activation, int screened,"
    " int leading)"
    " -> (Tensor y, Tensor nonzeros, Tensor l1, Tensor fired, Tensor overflow, Tensor[] saved)"
)
_library.define(
    "sparse_ffn_backward(Tensor? dy, Tensor? dl1, Tensor x, Tensor? w_gate, Tensor w_up, Tensor w_down, Tensor? hot,"
    " Tensor? l1_weight, Tensor[] saved, str backend, bool[] needs, str activation)"
    " -> (Tensor dx, Tensor dw_gate, Tensor dw_up, Tensor dw_down)"
)
_forward_op = getattr(torch.ops, NAMESPACE).sparse_ffn.default
_backward_op = getattr(torch.ops, NAMESPACE).sparse_ffn_backward.default


def _stats_like(operands: Operands, options: Options) -> tuple[Tensor, ...]:
    x = operands.x
    shapes = ((x.shape[0],), (), (operands.w_up.shape[0],), ()) if options.stats else ((0,),) * 4
    dtypes = (torch.int32, torch.promote_types(x.dtype, torch.float32), torch.bool, torch.int64)
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def _computed(backend: str, operands: Operands, options: Options) -> Forward:
    x, hot = operands.x, operands.hot
    if under_autocast(x.device.type):  # the backend says itself which dtype each product has
        with torch.autocast(x.device.type, enabled=False):
            return _computed(backend, operands, options)
    for_y_alone = not (options.stats or options.training)
    if for_y_alone and (hot is not None or options.leading) and registry.has_few_tokens(backend, *x.shape):
        hot, options = None, options._replace(leading=0)  # `_hot_of` cannot tell in a program for any number of tokens
    if options.leading:
        result = _prefix_split(backend, operands, options)
    elif hot is not None:
        result = hot_split.forward(registry.get(backend), x, operands.weights, hot, options)
    else:
        result = registry.get(backend).forward(x, operands.weights, options)
    if options.stats and result.overflow is None:
        return result._replace(overflow=x.new_zeros((), dtype=torch.int64))
    return result


# The arguments of the operators are those of their schemas, in that order.


def _forward(*arguments: Any) -> tuple[Any, ...]:
    operands, options = Operands(*arguments[:6]), Options(*arguments[7:])
    return _as_outputs(_computed(arguments[6], operands, options), operands, options)


def _as_outputs(result: Forward, operands: Operands, options: Options) -> tuple[Any, ...]:
    stats = result[1:5] if options.stats else _stats_like(operands, options)
    return (result.y, *stats, list(result.saved))


def _forward_fake(*arguments: Any) -> tuple[Any, ...]:
    operands, backend, options = Operands(*arguments[:6]), arguments[6], Options(*arguments[7:])
    x, hot = operands.x, operands.hot
    saved: Sequence[Tensor] = ()
    if options.training and hot is not None:
        saved = hot_split.saved_like(registry.get(backend), x, operands.weights, hot, options)
    elif options.training:
        saved = registry.get(backend).saved_like(x, operands.weights, options)
    return (x.new_empty(x.shape), *_stats_like(operands, options), list(saved))


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Sequence[Any]) -> None:
    *tensors, ctx.backend = inputs[:7]
    options = Options(*inputs[7:])
    ctx.activation = options.activation
    _, nonzeros, l1, fired, overflow, saved = output
    # Without this, autograd would create a zero gradient for each saved tensor.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(nonzeros, fired, overflow, *saved, *(() if options.stats else (l1,)))
    ctx.save_for_backward(*tensors, *saved)


def _differentiate(ctx: Any, dy: Tensor | None, d_nonzeros: None, dl1: Tensor | None, *others: None) -> tuple:
    return *_gradients(_backward_op, ctx, dy, dl1), *(None,) * 10


def _gradients(backward: Callable[..., Any], ctx: Any, dy: Tensor | None, dl1: Tensor | None) -> tuple:
    tensors, needs = ctx.saved_tensors, list(ctx.needs_input_grad[:4])
    gradients = backward(dy, dl1, *tensors[:6], list(tensors[6:]), ctx.backend, needs, ctx.activation)
    return tuple(g if needed else None for g, needed in zip(gradients, needs, strict=True))


class _Direct(torch.autograd.Function):
    """The operator with its derivative, for calls that bypass the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, backend, options, growth = arguments
        operands = Operands(*tensors)
        result = _computed(backend, operands, options)
        output = _as_outputs(result, operands, options)
        _setup_context(ctx, (*arguments[:-2], *options), output)
        ctx.count = result.saved_entries
        if growth is not None and result.saved_entries is not None:
            growth.opened(result.saved_entries)
        return output[:5]

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, d_nonzeros: None, dl1: Tensor | None, *others: None) -> Any:
        # With create_graph the gradients need a derivative; the operator's raises a clear error.
        backward = _backward_op if torch.is_grad_enabled() else functools.partial(_backward, count=ctx.count)
        return *_gradients(backward, ctx, dy, dl1), *(None,) * 5


def _backward(
    dy: Tensor | None, dl1: Tensor | None, *arguments: Any, count: EntryCount | None = None
) -> tuple[Tensor, ...]:
    operands, (saved, backend, needs, activation) = Operands(*arguments[:6]), arguments[6:]
    x, hot, weights, wanted = operands.x, operands.hot, operands.weights, Needs(*needs)
    if under_autocast(x.device.type):  # the backend says itself which dtype each product has
        with torch.autocast(x.device.type, enabled=False):
            return _backward(dy, dl1, *arguments, count=count)
    dy = x.new_zeros(x.shape) if dy is None else dy
    if hot is not None:
        found = hot_split.backward(registry.get(backend), dy, dl1, x, weights, hot, saved, wanted, activation)
    else:
        found = registry.get(backend).backward(dy, dl1, x, weights, saved, wanted, activation)
    # Asked only now, so that the device has work while this waits for the forward.
    if _exceeded(backend, saved, count):
        found = dense.gradients(dy, dl1, x, weights, wanted, activation)  # of the whole block, hot neurons included
    gradients = found._replace(down=None if found.down is None else found.down.t())
    return tuple(
        x.new_empty(0) if g is None or t is None else _laid_out(g, t)
        for g, t in zip(gradients, operands[:4], strict=True)
    )


def _exceeded(backend: str, saved: Sequence[Tensor], count: EntryCount | None) -> bool:
    """Whether a forward had more non-zeros than capacity, so that its saved tensors are incomplete. Waits for it."""
    needed_capacity = registry.get(backend).needed_capacity
    if needed_capacity is None:
        return False
    needed = needed_capacity(saved, count)
    if count is not None and count.growth is not None:
        count.growth.closed(count, needed)
    if needed is not None and backend not in _logged_backends:
        _logged_backends.add(backend)
        logger.warning(
            "backend %s: a call had more non-zeros than its capacity, which would have to be %d. Its gradients are "
            "computed by dense products: exact, but slower. Further such calls are not logged",
            *(backend, needed),
        )
    return needed is not None


_logged_backends: set[str] = set()


def _laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """With the strides of `like`, or contiguous if that has gaps, so that a parameter takes it without a copy."""
    if gradient.stride() == like.stride():
        return gradient
    return torch.empty_like(like).copy_(gradient)


def _backward_fake(dy: Tensor | None, dl1: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, needs = arguments[:4], arguments[8]
    return tuple(
        torch.empty_like(t) if t is not None and needed else arguments[0].new_empty(0)
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
