"""Finds where a graph draws random numbers: what it gives then differs from run to run, and proves nothing."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass

from rmsnorm_deploy.fusion.records import last_place, location_of

_DRAWING = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}


def program_draws(program: torch.export.ExportedProgram) -> str | None:
    """The ops of a traced program that draw random numbers, as `random_draws` puts it.

    PyTorch's exporter leaves out the dropout of attention, which a program that is run has.
    """
    found = [
        (node.target.__name__.split(".")[0], last_place(node.meta.get("stack_trace") or ""))
        for module in program.graph_module.modules()  # branches and regions too
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.users and _is_seeded(node.target, node)
    ]
    return _in_words(found)


def _is_seeded(op: torch._ops.OpOverload, node: torch.fx.Node) -> bool:
    """Whether a call takes numbers from PyTorch's generator: of dropouts and the like only one that is in effect."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {item.name: _argument(item, place, node) for place, item in enumerate(op._schema.arguments)}
    off = [name for name in ("dropout_p", "p", "train", "training") if name in given and not given[name]]
    return not off


def _argument(item: Any, place: int, node: torch.fx.Node) -> Any:
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(item.name, item.default_value)


def random_draws(model: ir.Model) -> str | None:
    """The ops that draw random numbers for an output, in words: "Dropout at model.py:12, RandomNormal"; None if none.

    A Dropout counts where it is in training mode by a constant, and drops something.
    """
    if not any(_draws(node) for node in _nodes(model)):
        return None
    alive = model.clone()
    for copied, node in zip(_nodes(alive), _nodes(model), strict=True):
        copied.meta.update(node.meta)  # where the exporter's stack traces are
    RemoveUnusedNodesPass()(alive)
    found = [(node.op_type, location_of(node)) for node in _nodes(alive) if _draws(node)]
    return _in_words(found)


def _in_words(found: list[tuple[str, str | None]]) -> str | None:
    return ", ".join(dict.fromkeys(f"{op} at {place}" if place else op for op, place in found)) or None


def _nodes(model: ir.Model) -> list[ir.Node]:
    functions = [node for function in model.functions.values() for node in function.all_nodes()]
    return [*model.graph.all_nodes(), *functions]


def _draws(node: ir.Node) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    return node.op_type in _DRAWING or (node.op_type == "Dropout" and _drops(node))


def _drops(node: ir.Node) -> bool:
    """Whether an ONNX Dropout of opset 12 or newer is in training mode; older ones never are."""
    ratio, training = (_constant(node, index) for index in (1, 2))
    return bool(training) and ratio != 0


def _constant(node: ir.Node, index: int) -> float | None:
    """An input's one number, where it is known."""
    value = node.inputs[index] if index < len(node.inputs) else None
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None
