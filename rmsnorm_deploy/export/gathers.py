"""Takes out a GatherND that takes all there is: ``data[b, t]`` for each ``b`` and ``t`` is a view of data.

Masks are computed so where they are functions of a batch's, a query's and a key's number, as in transformers:

    Concat(each number of data's first axis, each of its second, ...) -> GatherND(data) => Unsqueeze(data)
"""

from __future__ import annotations

import onnx_ir as ir

from rmsnorm_deploy.export.elements import Element, Elements
from rmsnorm_deploy.export.nodes import is_op, producer, put_in_place
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.values import Shapes


def skip_gathers(graph: ir.Graph, shapes: Shapes) -> None:
    """Put an Unsqueeze in the place of each GatherND that adds axes of size one and does nothing else, in place."""
    constants = Constants()
    elements = Elements(shapes, constants)
    for node in list(graph):
        added = _added(node, shapes, elements, constants) if is_op(node, "GatherND") else None
        if added is None:
            continue
        axes = ir.node("Constant", [], {"value": ir.tensor(added, ir.DataType.INT64)})
        view = ir.node("Unsqueeze", [node.inputs[0], axes.outputs[0]])
        axes.outputs[0].dtype = ir.DataType.INT64
        view.metadata_props.update(node.metadata_props)
        graph.insert_before(node, [axes, view])
        put_in_place(node.outputs[0], view.outputs[0])


def _added(gather: ir.Node, shapes: Shapes, elements: Elements, constants: Constants) -> list[int] | None:
    """The axes that a GatherND adds to its data, where it takes each element of that once and in order."""
    data, (result,) = gather.inputs[0], gather.outputs
    before, after = shapes.get(data) if data is not None else None, shapes.get(result)
    if before is None or after is None or None in before or gather.attributes.get_int("batch_dims", 0) != 0:
        return None
    axes = range(len(after))
    found = [elements.of(index, tuple(axes)) for index in _indices(gather, len(after), constants)]
    kept = [place for element in found for place in element.places if place is not None]
    if found != [Element(1, (place,)) for place in kept] or kept != sorted(set(kept)):
        return None
    added = [axis for axis in axes if axis not in kept]
    same = [after[axis] for axis in kept] == list(before) and all(after[axis] == 1 for axis in added)
    return added if same else None


def _indices(gather: ir.Node, rank: int, constants: Constants) -> list[ir.Value]:
    """The indices that a GatherND's index is made of, each of the result's shape; none, where it is no such index."""
    concat = producer(gather.inputs[1], "Concat")
    if concat is None or concat.attributes["axis"].as_int() not in (-1, rank):
        return []
    parts = [producer(value, "Unsqueeze") for value in concat.inputs]
    last = [part for part in parts if part is not None and constants.integers(part.inputs[1]) in ([-1], [rank])]
    return [part.inputs[0] for part in last if part.inputs[0] is not None] if len(last) == len(parts) else []
