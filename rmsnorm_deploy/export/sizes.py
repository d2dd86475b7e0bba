"""Shapes as tensors: what a Reshape reads, made from the sizes of the graph's inputs, once a graph."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from rmsnorm_deploy.fusion.values import shape_of

Size = int | str | tuple[int, str]  # a number, a dimension's name, or so many times a name


class Sizes:
    """Makes int64 vectors of sizes, at the graph's beginning, where every node can read them."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._first = graph[0]
        self._made: dict[tuple[Size, ...], ir.Value] = {}
        self._places: dict[str, tuple[ir.Value, int]] = {}
        for value in graph.inputs:
            for axis, dim in enumerate(shape_of(value) or ()):
                if isinstance(dim, str):
                    self._places.setdefault(dim, (value, axis))

    def has(self, *dims: int | str | None) -> bool:
        """Whether each of ``dims`` is a number or the size of an input's axis."""
        return all(isinstance(dim, int) or dim in self._places for dim in dims)

    def of(self, sizes: Sequence[Size]) -> ir.Value:
        """A vector of ``sizes``, whose names must be among those that `has` knows."""
        key = tuple(sizes)
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, sizes: tuple[Size, ...]) -> ir.Value:
        if all(isinstance(size, int) for size in sizes):
            return self._add(ir.node("Constant", [], {"value": ir.tensor(list(sizes), ir.DataType.INT64)}), len(sizes))
        if len(sizes) > 1:
            return self._add(ir.node("Concat", [self.of([size]) for size in sizes], {"axis": 0}), len(sizes))
        (size,) = sizes
        if isinstance(size, tuple):
            factor, name = size
            return self._add(ir.node("Mul", [self.of([name]), self.of([factor])]), 1)
        value, axis = self._places[str(size)]
        return self._add(ir.node("Shape", [value], {"start": axis, "end": axis + 1}), 1)

    def _add(self, node: ir.Node, length: int) -> ir.Value:
        output = node.outputs[0]
        output.dtype, output.shape = ir.DataType.INT64, ir.Shape([length])
        self._graph.insert_before(self._first, node)
        return output


def times(factor: int, dim: int | str) -> Size:
    """``factor`` times a dimension."""
    return factor * dim if isinstance(dim, int) else (factor, dim)
