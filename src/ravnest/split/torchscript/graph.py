"""Run a TorchScript graph in Python, node by node, so that ``torch.export`` sees its operators.

Branches are decided and loops are unrolled while the graph is captured; sizes stay symbolic.
"""

from __future__ import annotations

import contextlib
import linecache
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from ravnest.errors import CaptureError
from ravnest.split.torchscript.mirror import ModuleValue
from ravnest.split.torchscript.ops import DataDependentError, evaluate, shape_arithmetic
from ravnest.split.torchscript.schema import UnsupportedOperatorError

Node = torch._C.Node
Graph = Any  # torch's stub of torch._C.Graph leaves out most of it
Values = dict[str, Any]

_DATA_DEPENDENT = (DataDependentError, DataDependentOutputException, GuardOnDataDependentSymNode)
_FILE = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
_MARKED = re.compile(r"^(?P<code>.*)\n *~[~ ]*(?:<--- HERE)?$", re.MULTILINE)
_FRAME = re.compile(r"^(?P<path>.+)\((?P<line>\d+)\): (?P<function>.+)$", re.MULTILINE)
_TORCH = Path(torch.__file__).parent
_MANGLED = re.compile(r"\.___torch_mangle_\d+")


class TorchScriptProgram:
    """A graph with its constants. Calling it computes the graph's outputs."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._constants: Values = {}
        self._numbers: Values = {}
        for node in graph.findAllNodes("prim::Constant"):
            name, value = node.output().debugName(), _constant(node)
            self._constants[name] = value
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                with _disable_current_modes():  # while exporting, not even a constant has a value
                    self._numbers[name] = value.item()

    def __call__(self, *inputs: Any) -> Any:
        """Compute the outputs: one value, or a tuple of several."""
        values = dict(self._constants)
        _bind(values, self._graph.inputs(), inputs)
        outputs = self.run(self._graph, values)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, block: Graph | torch._C.Block, values: Values) -> list[Any]:
        """Run the nodes of a block, which extends ``values``; return the block's outputs."""
        for node in block.nodes():
            if node.kind() != "prim::Constant":
                args = [values[value.debugName()] for value in node.inputs()]
                _bind(values, node.outputs(), self._compute(node, args, values))
        return [values[value.debugName()] for value in block.outputs()]

    def _compute(self, node: Node, args: list[Any], values: Values) -> Sequence[Any]:
        kind = node.kind()
        if kind in _CONTROL_FLOW:
            return _CONTROL_FLOW[kind](self, node, args, values)
        with _translated(node):
            if kind in _HANDLERS:
                return _HANDLERS[kind](node, args)
            return self._operate(node, args)

    def _operate(self, node: Node, args: list[Any]) -> Sequence[Any]:
        schema = node.schema()
        if schema == "(no schema)":
            raise UnsupportedOperatorError(f"{node.kind()} cannot be captured")
        names = [value.debugName() for value in node.inputs()]
        constants = [self._numbers.get(*pair) for pair in zip(names, args, strict=True)]
        result = shape_arithmetic(schema, args, constants)
        if result is NotImplemented:
            result = evaluate(schema, args)
        return result if node.outputsSize() > 1 else (result,)


def _constant(node: Node) -> Any:
    value = node.output()
    return None if value.type().kind() == "FunctionType" else value.toIValue()


def _bind(values: Values, names: Iterable[torch._C.Value], results: Sequence[Any]) -> None:
    for name, result in zip(names, results, strict=False):
        values[name.debugName()] = result


def where(node: Node) -> str:
    """Return the line of the user's code that a node comes from: ``model.py:12: y = f(x)``."""
    # An assignment has no line of its own, but the value that it assigns does.
    nodes = (node, *(value.node() for value in reversed(list(node.inputs()))))
    text = next(filter(None, (str(candidate.sourceRange()) for candidate in nodes)), "")
    frames = list(_FRAME.finditer(text.partition("Serialized ")[0]))
    if frames:  # a trace records the stack, innermost first
        users = (frame for frame in frames if not Path(frame["path"]).is_relative_to(_TORCH))
        frame = next(users, frames[0])
        code = linecache.getline(frame["path"], int(frame["line"])).strip()
        return f"{frame['path']}:{frame['line']}: {code or frame['function']}"
    file = _FILE.search(text)
    if file is None:
        return "an unknown line (the TorchScript file does not record it)"
    marked = _MARKED.search(text)
    return f"{file['path']}:{file['line']}: {marked['code'].strip() if marked else ''}"


@contextlib.contextmanager
def _translated(node: Node) -> Iterator[None]:
    """Translate errors at a node to a ``CaptureError`` with the user's line."""
    try:
        yield
    except CaptureError:
        raise
    except _DATA_DEPENDENT as error:
        raise CaptureError(
            f"{where(node)}\nthe TorchScript model uses the value of a tensor here (if, while, "
            "int(), float(), .item() or a size that depends on data), which is unknown during "
            "capture: use torch.where or masks, or decide outside the model"
        ) from error
    except UnsupportedOperatorError as error:
        raise CaptureError(
            f"{where(node)}\nthe TorchScript model cannot be captured: {error}. Write this line "
            "another way, or pass the Python model that TorchScript was made from"
        ) from error
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise CaptureError(
            f"{where(node)}\n{node.kind()} fails on the example inputs: {error}. Check that the "
            "TorchScript model runs on them"
        ) from error


def _if(program: TorchScriptProgram, node: Node, args: list[Any], values: Values) -> Sequence[Any]:
    with _translated(node):
        taken = 0 if args[0] else 1
    return program.run(list(node.blocks())[taken], values)


def _loop(program: TorchScriptProgram, node: Node, args: list[Any], values: Values) -> Sequence[Any]:
    limit, condition, *carried = args
    body = next(iter(node.blocks()))
    step = 0
    while _continues(node, step, limit, condition):
        _bind(values, body.inputs(), [step, *carried])
        condition, *carried = program.run(body, values)
        step += 1
    return carried


def _continues(node: Node, step: int, limit: Any, condition: Any) -> bool:
    with _translated(node):
        return bool(condition) and step < int(limit)


def _fork(_program: TorchScriptProgram, node: Node, args: list[Any], _values: Values) -> Sequence[Any]:
    graph = node.g("Subgraph").copy()
    torch._C._jit_pass_inline(graph)
    return [TorchScriptProgram(graph)(*args)]


def _call_method(
    _program: TorchScriptProgram, node: Node, args: list[Any], _values: Values
) -> Sequence[Any]:
    module: ModuleValue = args[0]
    return [TorchScriptProgram(module.graph(node.s("name")))(*args)]


def _call_function(
    _program: TorchScriptProgram, node: Node, args: list[Any], _values: Values
) -> Sequence[Any]:
    """Run a function that torch did not inline, which happens after another script has run it."""
    name = str(next(iter(node.inputs())).type())
    function = torch.jit._state._python_cu.find_function(name)
    if function is None:
        raise CaptureError(
            f"{where(node)}\nthe script calls {name}, which does not exist in this process"
        )
    return [TorchScriptProgram(function.inlined_graph)(*args[1:])]


_CONTROL_FLOW: Mapping[str, Callable[[TorchScriptProgram, Node, list[Any], Values], Sequence[Any]]] = {
    "prim::If": _if,
    "prim::Loop": _loop,
    "prim::fork": _fork,
    "prim::CallMethod": _call_method,
    "prim::CallFunction": _call_function,
}


def _get_attribute(node: Node, args: list[Any]) -> Sequence[Any]:
    target, name = args[0], node.s("name")
    return [target.read(name) if isinstance(target, ModuleValue) else getattr(target, name)]


def _set_attribute(node: Node, args: list[Any]) -> Sequence[Any]:
    target, value = args
    name = node.s("name")
    if not isinstance(target, ModuleValue):
        setattr(target, name, value)
    elif not target.assign(name, value):
        raise CaptureError(
            f"{where(node)}\nforward assigns self.{name}, which a captured graph would lose: only "
            "buffers persist, if they keep shape and dtype. Use register_buffer, or return the value"
        )
    return []


def _create_object(node: Node, _args: list[Any]) -> Sequence[Any]:
    name = _MANGLED.sub("", node.output().type().annotation_str)
    if name.endswith("autocast_mode.autocast"):
        raise CaptureError(
            f"{where(node)}\nautocast inside forward cannot be captured: remove it there, and "
            "choose the precision when training starts"
        )
    return [_CONTEXTS.get(name, SimpleNamespace)()]


_CONTEXTS: Mapping[str, Callable[[], Any]] = {
    "__torch__.torch.autograd.grad_mode.no_grad": torch.no_grad,
    "__torch__.torch.autograd.grad_mode.enable_grad": torch.enable_grad,
}


def _enter(node: Node, args: list[Any]) -> Sequence[Any]:
    context = args[0]
    if isinstance(context, contextlib.AbstractContextManager):
        context.__enter__()
    elif not hasattr(context, "run_callbacks_on_exit"):  # the profiler's record_function
        raise UnsupportedOperatorError(f"the context manager {node.input().type()} is not supported")
    return [context]


def _exit(_node: Node, args: list[Any]) -> Sequence[Any]:
    context = args[0]
    if isinstance(context, contextlib.AbstractContextManager):
        context.__exit__(None, None, None)
    return [None]


def _raise(node: Node, args: list[Any]) -> Sequence[Any]:
    raise CaptureError(f"{where(node)}\nthe model raised for the example inputs: {args[0]}")


def _python_call(_node: Node, _args: list[Any]) -> Sequence[Any]:
    raise UnsupportedOperatorError("it calls Python code marked with @torch.jit.ignore")


def _construct_tuple(node: Node, args: list[Any]) -> Sequence[Any]:
    kind: Any = node.output().type()
    fields = field_names(kind.str())
    if not fields:
        return [tuple(args)]
    return [_namedtuple(kind.annotation_str.rpartition(".")[2], fields)(*args)]


@cache
def _namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(name, fields)


@cache
def field_names(description: str) -> tuple[str, ...]:
    """Return the fields of ``NamedTuple(a : Tensor, b : (int, Tensor))``; () for a plain tuple."""
    if not description.startswith("NamedTuple("):
        return ()
    depth, names, word = 0, [], ""
    for character in description.removeprefix("NamedTuple("):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            word = ""
        elif character == ":" and depth == 0:
            names.append(word.strip())
        else:
            word += character
    return tuple(names)


def _container_item(_node: Node, args: list[Any]) -> Sequence[Any]:
    return [args[0].item(args[1])]


def _is_instance(node: Node, args: list[Any]) -> Sequence[Any]:
    return [any(_has_type(args[0], kind) for kind in node.tys("types"))]


def _has_type(value: Any, kind: Any) -> bool:
    if kind.kind() == "ListType":
        element = kind.getElementType()
        return isinstance(value, list) and all(_has_type(item, element) for item in value)
    if kind.kind() not in _TYPES:
        raise UnsupportedOperatorError(f"isinstance with {kind} is not supported")
    return isinstance(value, _TYPES[kind.kind()]) and not (
        isinstance(value, bool) and kind.kind() == "IntType"
    )


_TYPES: Mapping[str, tuple[type, ...]] = {
    "TensorType": (torch.Tensor,),
    "IntType": (int, torch.SymInt),
    "FloatType": (float, torch.SymFloat),
    "BoolType": (bool, torch.SymBool),
    "StringType": (str,),
    "NoneType": (type(None),),
}


def _first(_node: Node, args: list[Any]) -> Sequence[Any]:
    return args[:1]


_HANDLERS: Mapping[str, Callable[[Node, list[Any]], Sequence[Any]]] = {
    "prim::GetAttr": _get_attribute,
    "prim::SetAttr": _set_attribute,
    "prim::CreateObject": _create_object,
    "prim::ModuleContainerIndex": _container_item,
    "prim::Enter": _enter,
    "prim::Exit": _exit,
    "prim::RaiseException": _raise,
    "prim::PythonOp": _python_call,
    "prim::Print": lambda _node, _args: [],
    "prim::Uninitialized": lambda _node, _args: [None],
    "prim::isinstance": _is_instance,
    "prim::ListConstruct": lambda _node, args: [list(args)],
    "prim::DictConstruct": lambda _node, args: [dict(zip(args[::2], args[1::2], strict=True))],
    "prim::TupleConstruct": _construct_tuple,
    "prim::ListUnpack": lambda _node, args: args[0],
    "prim::TupleUnpack": lambda _node, args: args[0],
    "prim::TupleIndex": lambda _node, args: [args[0][args[1]]],
    "prim::TupleSlice": lambda node, args: [args[0][node.i("beg") : node.i("end")]],
    "prim::IfThenElse": lambda _node, args: [args[1] if args[0] else args[2]],
    "prim::EnumName": lambda _node, args: [args[0].name],
    "prim::EnumValue": lambda _node, args: [args[0].value],
    "prim::unchecked_cast": _first,
    "prim::unchecked_unwrap_optional": _first,
    "prim::NumToTensor": _first,
    "aten::wait": _first,
}
