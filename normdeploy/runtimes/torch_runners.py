"""Run the exported graph in torch: in the model's own dtype, and in float64 as the reference of every comparison.

``program.module()`` is not used, because it would run the guards that a file contains. Also, ``.double()`` on its
result does not change dtypes that are written in the graph. LLaMA's norm, for example, would still compute in float32
inside, with an error of 1.5e-7.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from ..errors import InputError, NormdeployError
from ..graphs.proto_queries import strip_invented_module
from ..inputs.array_conversion import check_feeds, to_numpy, to_torch
from ..loading.live_module import copy_module
from ..loading.program_signature import user_outputs, with_constant_inputs
from ..loading.torch_state import PROCESS_STATE, preserve_torch_state
from ..loading.transformers_switches import omit_caches
from ..model import LoadedModel, TraceRun
from ..types import Arrays
from . import HeldRunner, RunResult
from .data_independent import DataIndependent
from .data_independent_trace import find_data_independent_nodes
from .depthwise_conv import convolve_channels
from .dtype_widening import half_dtype_map, saturate_fills, saturate_to_half, widen_graph, widen_tensor
from .fake_quantize import fake_quantize_float64
from .fourier_error import spread_nan
from .ordering_operators import ChoiceGuide

# Value of ``--precision`` -> dtype.
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Operators that read most weights. They neither write to an argument nor return a view of one.
_READERS = frozenset(
    {
        *(f"aten::{op}" for op in ("linear", "mm", "addmm", "bmm", "matmul", "embedding", "convolution")),
        *(f"aten::conv{rank}d" for rank in (1, 2, 3)),
        *(f"aten::conv_transpose{rank}d" for rank in (1, 2, 3)),
    }
)


class _TorchRunner(HeldRunner):
    """Base of runners that interpret a torch.fx graph with the model's parameters."""

    name: str
    _interpreter: type[_LocatingInterpreter]

    def __init__(self, model: LoadedModel, graph: torch.fx.GraphModule, lifted: dict[str, Any]) -> None:
        self._model = model
        self._graph = graph
        self._lifted = lifted
        self._mutates = any(_is_mutating(node) for inner in _iter_graphs(graph) for node in inner.nodes)
        # Names of the lifted values that a run may write to.
        self._writable = frozenset(_find_writable(graph) if self._mutates else ())
        self._guide: ChoiceGuide | None = None

    @contextmanager
    def guided(self, guide: ChoiceGuide | None) -> Iterator[None]:
        """Show the choices of every run within the context, such as those of topk, to ``guide``, or replace them."""
        self._guide = guide
        try:
            yield
        finally:
            self._guide = None

    def _input_tensors(self, feeds: Arrays) -> list[torch.Tensor]:
        check_feeds(self.name, feeds, self._model.inputs)
        return [to_torch(feeds[spec.name]) for spec in self._model.inputs]

    def _call_graph(self, inputs: Sequence[torch.Tensor], lifted: Mapping[str, Any]) -> RunResult:
        interpreter = self._interpreter(self._graph)
        interpreter.guide = self._guide
        if self._guide is not None:
            self._guide.start_run()
        with preserve_torch_state(), torch.no_grad():
            return self._name_outputs(interpreter.run(*self._graph_arguments(inputs, lifted)))

    def _graph_arguments(self, inputs: Sequence[torch.Tensor], lifted: Mapping[str, Any]) -> list[Any]:
        given = iter(with_constant_inputs(self._model.program, inputs))
        arguments = []
        for spec in self._model.program.graph_signature.input_specs:
            if spec.kind == InputKind.USER_INPUT:
                arguments.append(next(given))
            else:
                # Copy values that the graph writes to, so that every call begins from the loaded values.
                value = lifted[spec.arg.name]
                is_written = spec.arg.name in self._writable and isinstance(value, torch.Tensor)
                arguments.append(value.clone() if is_written else value)
        return arguments

    def _name_outputs(self, returned: Sequence[Any]) -> RunResult:
        specs = self._model.program.graph_signature.output_specs
        return self._name_user_outputs(
            [value for value, spec in zip(returned, specs, strict=True) if spec.kind == OutputKind.USER_OUTPUT]
        )

    def _name_user_outputs(self, returned: Sequence[Any]) -> RunResult:
        outputs = user_outputs(self._model.program)
        kept = [v for v, item in zip(returned, outputs, strict=True) if not isinstance(item, ConstantArgument)]
        return {name: to_numpy(value) for name, value in zip(self._model.outputs, kept, strict=True)}

    def _free_model(self) -> None:
        self._lifted = {}


class EagerRunner(_TorchRunner):
    """Run ``model`` in torch on the CPU, operator by operator, in its own dtype."""

    name = "eager"

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, model.program.graph_module, lifted_values(model.program))
        self._bfloat16 = any(
            _is_bfloat16(node.meta.get("val")) for graph in _iter_graphs(self._graph) for node in graph.nodes
        )

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the model once.

        Returns:
            Output name -> array.

        Raises:
            InputError: the feeds do not fit the model's inputs, or the model does not run on them.
        """
        inputs = self._input_tensors(feeds)
        try:
            with _without_amx() if self._bfloat16 else nullcontext():
                return self._call_graph(inputs, self._lifted)
        except _NodeFailed as failed:
            raise InputError(
                f"the model does not run on these inputs: {failed}; pass sizes and values that it accepts"
            ) from failed

    def find_trace_run(self, feeds: Arrays) -> TraceRun | None:
        """Return the run of the same program on the same inputs that loading has made; None if there is none."""
        # In bfloat16, the trace ran with other kernels than `infer` uses.
        if self._bfloat16:
            return None
        runs = (run for run in self._model.trace_runs if run.program is self._model.program)
        return next((run for run in runs if _have_equal_bits(run.feeds, feeds)), None)

    def trace_outputs(self, run: TraceRun) -> RunResult:
        """Name the outputs of a run of the trace as ``infer`` does."""
        return self._name_user_outputs(run.outputs)


class ModuleRunner(_TorchRunner):
    """Run a live module as its user does. ``model`` is the trace of this module.

    Each call runs a copy of the module, so state that ``forward`` writes reaches neither the user's module nor the next
    call.
    """

    name = "the module"

    def __init__(self, model: LoadedModel, module: torch.nn.Module) -> None:
        super().__init__(model, model.program.graph_module, {})
        self._module = module

    def infer(self, feeds: Arrays) -> RunResult:
        """Run a copy of the module once.

        Returns:
            Output name -> array, by the names of the model's outputs.

        Raises:
            InputError: the feeds do not fit, or the module does not run on them, or the module's outputs differ from
                those of ``model``.
        """
        return self._run_module(self._copy_for_run(), feeds)

    def infer_twice(self, feeds: Arrays) -> tuple[RunResult, RunResult]:
        """Run one copy of the module twice on the same inputs. If the module keeps state from call to call, the results
        differ.

        Returns:
            Outputs of the first and of the second call, as from ``infer``.
        """
        module = self._copy_for_run()
        return self._run_module(module, feeds), self._run_module(module, feeds)

    def _copy_for_run(self) -> torch.nn.Module:
        """Copy the module. Its caches are left out, as in the trace; its experts stay as the user chose them."""
        module = copy_module(self._module).eval()
        omit_caches(module)
        return module

    def _run_module(self, module: torch.nn.Module, feeds: Arrays) -> RunResult:
        flat = with_constant_inputs(self._model.program, self._input_tensors(feeds))
        args, kwargs = tree_unflatten(flat, self._model.program.call_spec.in_spec)
        # Without gradients, torch's encoder layers use a fused kernel, which traces do not contain. The kernel returns
        # NaN if a mask hides a whole row.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with preserve_torch_state(), torch.no_grad():
                # forward may write into its arguments.
                constants = {name: value.clone() for name, value in self._model.constants.items()}
                returned = tree_leaves(module(*args, **{**kwargs, **constants}))
        except Exception as error:
            # The user's forward may raise any exception.
            raise InputError(f"the module does not run on these inputs: {type(error).__name__}: {error}") from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
        outputs = user_outputs(self._model.program)
        if len(returned) != len(outputs):
            raise InputError(f"the module returns {len(returned)} values, but its trace {len(outputs)}")
        return self._name_user_outputs(returned)


class HalfRunner(_TorchRunner):
    """Run ``model`` in torch on the CPU with float32 replaced by ``half`` in parameters, inputs and the whole graph.

    Its outputs are PyTorch's results in half precision (float16 or bfloat16), with which half-precision files are
    compared. The caller passes inputs in the model's own dtypes, and they are rounded to ``half``. Floating outputs are
    in ``half``. An operator without a kernel for ``half`` runs in float32 and its result is rounded. Finite constants
    beyond the range of ``half``, such as masks, become its largest or lowest number. An upcast to float32 in the model
    becomes ``half`` too: in a graph traced in float32, an upcast can't be distinguished from a cast back to the model's
    own dtype.
    """

    name = EagerRunner.name

    def __init__(self, model: LoadedModel, half: torch.dtype) -> None:
        kind = half_dtype_map(half)
        lifted = {name: saturate_to_half(value, half) for name, value in lifted_values(model.program).items()}
        graph = copy.deepcopy(model.program.graph_module)
        saturate_fills(graph, half)
        super().__init__(model, widen_graph(graph, kind), lifted)
        self._half = half

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the model once.

        Returns:
            Output name -> array; floating outputs are in the half dtype.

        Raises:
            InputError: the feeds do not fit the model's inputs, or the model does not run on them.
        """
        inputs = [widen_tensor(tensor, half_dtype_map(self._half)) for tensor in self._input_tensors(feeds)]
        try:
            with _without_amx(), _default_dtype(self._half):
                return self._call_graph(inputs, self._lifted)
        except _NodeFailed as failed:
            raise InputError(f"the model does not run in {self._half} on these inputs: {failed}") from failed


class Float64Runner(_TorchRunner):
    """Runner of the reference: ``model`` with every floating dtype of its graph, parameters, buffers and constants set
    to float64.

    Inputs are upcast, so their values are the same as in the model's own dtype. Floating outputs are float64. ``model``
    itself is not changed; its parameters are upcast one at a time as they are used.

    Raises:
        NormdeployError: the graph reads the bits of a floating tensor, which differ in float64.
    """

    name = "float64 reference"

    def __init__(self, model: LoadedModel) -> None:
        super().__init__(model, widen_graph(copy.deepcopy(model.program.graph_module)), lifted_values(model.program))
        self._settled = find_data_independent_nodes(self._graph, self._lifted)
        self._interpreter = partial(WideningInterpreter, settled=self._settled)  # type: ignore[assignment]
        # A tensor that the graph writes to must be the same object for the whole run.
        self._lifted |= {name: widen_tensor(self._lifted[name]) for name in self._writable & self._lifted.keys()}

    def infer(self, feeds: Arrays) -> RunResult:
        """Run the model once in float64.

        Returns:
            Output name -> array; floating outputs are float64.

        Raises:
            InputError: the feeds do not fit the model's inputs.
            NormdeployError: an operator does not run in float64.
        """
        lifted = {
            n: NarrowParameter(v) if isinstance(v, torch.Tensor) and n not in self._writable else v
            for n, v in self._lifted.items()
        }
        return self._run_widened([widen_tensor(tensor) for tensor in self._input_tensors(feeds)], lifted)

    def run_perturbed(self, feeds: Arrays, unit: float, seed: int) -> RunResult:
        """Run the model with every parameter, buffer, constant and input changed at random by a relative error of up to
        ``unit``.

        Outputs that change much are ill-conditioned.

        Returns:
            Outputs as from ``infer``.
        """
        rng = torch.Generator().manual_seed(seed)

        def perturb_tensor(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return value
            return value * (1 + unit * (2 * torch.rand(value.shape, generator=rng, dtype=torch.float64) - 1))

        inputs = [perturb_tensor(widen_tensor(tensor)) for tensor in self._input_tensors(feeds)]
        return self._run_widened(
            inputs, {name: perturb_tensor(widen_tensor(value)) for name, value in self._lifted.items()}
        )

    def _run_widened(self, inputs: Sequence[torch.Tensor], lifted: Mapping[str, Any]) -> RunResult:
        try:
            # Operators such as arange(0.5) or the division of two ints return the default dtype. Fused attention
            # kernels skip masked keys, even if these keys contain NaN. The MATH backend follows the definition and does
            # not skip masked keys.
            with _default_dtype(torch.float64), sdpa_kernel(SDPBackend.MATH):
                return self._call_graph(inputs, lifted)
        except _NodeFailed as failed:
            raise NormdeployError(
                f"the float64 reference can't be run: {failed}; if the model itself runs on these inputs, the "
                "operator has no float64 implementation, so there is no reference to compare with"
            ) from failed


class _NodeFailed(Exception):
    """Raised if a node can't be run."""


class _LocatingInterpreter(torch.fx.Interpreter):
    """Interpreter whose errors name the operator and the module that failed.

    Attributes:
        guide: object that sees or replaces the choices of topk, sort and argmax; None for the run's own choices.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        # torch's traceback would add the user's source code to the message.
        self.extra_traceback = False
        self.guide: ChoiceGuide | None = None

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node.

        Returns:
            The node's value.

        Raises:
            _NodeFailed: the node failed; the message names operator and module.
        """
        try:
            value = super().run_node(n)
            if self.guide is None or n.name not in self.guide.nodes:
                return value
            scores = self.env[n.args[0]]  # type: ignore[index]
            if isinstance(scores, NarrowParameter):
                scores = widen_tensor(scores.tensor)
            return self.guide.choose(n, value, scores)
        except Exception as error:
            scopes = list(n.meta.get("nn_module_stack", {}).values())
            if scopes:
                path = strip_invented_module(str(scopes[-1][0]))
            else:
                path = ""
            if path:
                module = f" of module {path!r}"
            else:
                module = ""
            lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            raise _NodeFailed(f"operator {n.target}{module} failed: {lines[0]}") from error


class _Float32FallbackInterpreter(_LocatingInterpreter):
    """Interpreter that runs an operator in float32 and rounds the result, if torch has no kernel for the operator's
    dtypes.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator.

        Returns:
            The operator's result in the half dtype.
        """
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, NotImplementedError):
            halves = {
                t.dtype
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor) and t.dtype in HALVES.values()
            }
            if not halves:
                raise
            half = halves.pop()
            args, kwargs = tree_map(
                lambda v: widen_tensor(v, lambda d: torch.float32 if d == half else d), (args, kwargs)
            )
            result = super().call_function(target, args, kwargs)
            return tree_map(lambda v: widen_tensor(v, half_dtype_map(half)), result)


@dataclass(frozen=True)
class NarrowParameter:
    """Parameter that is converted to float64 when it is read."""

    tensor: torch.Tensor


class WideningInterpreter(_LocatingInterpreter):
    """Interpreter that converts each parameter to float64 when it is read. Settled integers are computed in the model's
    dtypes.

    Args:
        settled: the settled nodes (see `data_independent`).
    """

    def __init__(self, module: torch.fx.GraphModule, settled: DataIndependent[torch.fx.Node]) -> None:
        super().__init__(module)
        self._settled = settled
        # Settled floats, in the dtypes that the model states.
        self._stated: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node; a settled float node also runs in the model's dtypes.

        Returns:
            The node's value in float64.
        """
        if n in self._settled.floats:
            args, kwargs = map_arg((n.args, n.kwargs), self._read_as_stated)
            self._stated[n] = tree_map(_cast_as_traced, n.target(*args, **kwargs), n.meta["val"])  # type: ignore[operator]
        return super().run_node(n)

    def _read_as_stated(self, read: torch.fx.Node) -> Any:
        if read in self._stated:
            return self._stated[read]
        value = self.env[read]
        return _cast_as_traced(value.tensor if isinstance(value, NarrowParameter) else value, read.meta.get("val"))

    def map_nodes_to_values(self, args: Any, n: torch.fx.Node) -> Any:
        """Replace the nodes in ``args`` by their values.

        Returns:
            ``args`` with values: in the model's dtypes for a node that computes settled integers, else in float64.
        """
        if n in self._settled.integers:
            return map_arg(args, self._read_as_stated)
        return map_arg(args, lambda node: self._widen_parameter(self.env[node]))

    def _widen_parameter(self, value: Any) -> Any:
        if isinstance(value, NarrowParameter):
            return widen_tensor(value.tensor)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator, with replacements for operators that are wrong or slow in float64.

        Returns:
            Its result.
        """
        schema = getattr(target, "_schema", None)
        if schema is None:
            return super().call_function(target, args, kwargs)
        rounded = fake_quantize_float64(schema.name, args)
        if rounded is not None:
            return rounded
        convolved = convolve_channels(schema, args)
        if convolved is not None:
            return convolved
        return spread_nan(schema.name.partition("::")[2], args, kwargs, super().call_function(target, args, kwargs))


_TorchRunner._interpreter = _LocatingInterpreter
HalfRunner._interpreter = _Float32FallbackInterpreter


def _cast_as_traced(value: Any, stated: Any) -> Any:
    """Cast a floating tensor to the dtype of the traced value ``stated``."""
    tensors = isinstance(value, torch.Tensor) and isinstance(stated, torch.Tensor)
    if tensors and value.is_floating_point():
        return value.to(stated.dtype)
    return value


def _have_equal_bits(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype
        and value.shape == other[name].shape
        and value.tobytes() == other[name].tobytes()
        for name, value in one.items()
    )


def lifted_values(program: torch.export.ExportedProgram) -> dict[str, Any]:
    """Collect the parameters, buffers and constants that the graph takes as arguments.

    Returns:
        Placeholder name -> value.
    """
    values = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT and spec.target is not None:
            value = program.state_dict.get(spec.target, program.constants.get(spec.target))
            values[spec.arg.name] = value.detach() if isinstance(value, torch.Tensor) else value
    return values


def _iter_graphs(module: torch.nn.Module) -> Iterator[torch.fx.Graph]:
    yield from (m.graph for m in module.modules() if isinstance(m, torch.fx.GraphModule))


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


@contextmanager
def _without_amx() -> Iterator[None]:
    """Disable oneDNN within the context. For bfloat16, oneDNN uses AMX instructions, which kill the process in virtual
    machines that announce AMX but do not support it.
    """
    with warnings.catch_warnings():
        # ``flags`` also sets another option of torch, which causes a warning.
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _find_writable(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Yield the names of the inputs of a graph that another operator than those of `_READERS` reads.

    Such an operator may write to the input, or return a view to which another operator writes.
    """
    for node in graph.graph.nodes:
        schemas = (getattr(user.target, "_schema", None) for user in node.users)
        if node.op == "placeholder" and any(schema is None or schema.name not in _READERS for schema in schemas):
            yield node.name


def _is_mutating(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with PROCESS_STATE:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
