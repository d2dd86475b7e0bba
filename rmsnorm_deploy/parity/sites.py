"""The fused norms as places in two graphs: model.onnx, which is judged, and reference.onnx, the same before fusing.

A fused op's outputs keep the names of the values whose place they took, so a value of the one graph has its float64
truth, by name, in the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from rmsnorm_deploy.fusion.imports import split_skip_norms
from rmsnorm_deploy.opset import DOMAIN
from rmsnorm_deploy.parity.extract import Graph, Part, Piece
from rmsnorm_deploy.parity.onnx_file import all_nodes, read_model
from rmsnorm_deploy.parity.oracle import BundleLike

ONNX_OF = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}
_WIDTH = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
_LAYOUT_OPS = {"Cast", "Transpose"}  # what fusing puts in front of an op and behind it
_NOT_IN_A_NORM = {"MatMul", "Gemm", "Conv", "Softmax", "Einsum", "Attention", "LayerNormalization"}


@dataclass(frozen=True)
class Site:
    """One fused norm. Names are of values in both graphs.

    Attributes:
        record: the norm's entry in the manifest.
        depth: its place among the norms, in the graph's order.
        x: what is normalized; for a norm with a residual add it is the sum, which the op makes.
        addends: the two that the op adds, or none.
        y: the result.
        activation: the scale where it is computed by the model.
        problem: (rule, sentence) when the op is not there, or does not read what the model's own norm reads.
        order: which axis of x each axis of the op's own input is, where fusing put a transpose in front of it.
    """

    record: Mapping[str, Any]
    depth: int
    x: str
    y: str
    addends: tuple[str, ...] = ()
    activation: str | None = None
    problem: tuple[str, str] | None = None
    order: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The module's path, or the node's name."""
        return str(self.record["module"] or self.record["name"])

    @property
    def dtype(self) -> str:
        """Of x and the addends."""
        return str(self.record["dtype"])

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the op reads that the model computes."""
        return (*(self.addends or (self.x,)), *((self.activation,) if self.activation else ()))

    @property
    def outputs(self) -> tuple[str, ...]:
        return (self.y, self.x) if self.addends else (self.y,)

    def dtype_of(self, name: str) -> str:
        """The dtype of one of the site's values (y may be behind a cast: its own dtype is what arrays say)."""
        scale = str(self.record["scale_dtype"])
        if name == self.activation:
            return scale
        if name != self.y or self.record["scale_order"] == "before_cast":
            return self.dtype
        return max(self.dtype, scale, key=lambda dtype: _WIDTH[dtype])


@dataclass(frozen=True)
class Sites:
    """The sites of a bundle, in the order of the graph, with both graphs."""

    model: Graph
    reference: Graph
    sites: tuple[Site, ...]

    @property
    def values(self) -> list[str]:
        """Every value at a site, once."""
        return list(dict.fromkeys(name for site in self.sites for name in (*site.inputs, *site.outputs) if name))

    def dtypes(self) -> dict[str, str]:
        """The dtype of every value at a site."""
        return {name: site.dtype_of(name) for site in self.sites for name in (*site.inputs, *site.outputs) if name}

    def dtypes_before(self) -> dict[str, str]:
        """Of those that the graph before fusing computes."""
        return {name: dtype for name, dtype in self.dtypes().items() if self.reference.is_computed(name)}


def find_sites(bundle: BundleLike) -> Sites | None:
    """The sites of ``bundle``; None when it has no fused op, or no graph from before fusing."""
    if bundle.reference_path is None or not bundle.manifest["norms"]:
        return None
    proto = read_model(bundle.model_path)
    if not any(node.domain == DOMAIN for node in all_nodes(proto.graph)):
        return None
    model = Graph(proto, bundle.model_path.parent)
    reference = unfused_graph(bundle.reference_path)
    inner = {node.name for node in all_nodes(proto.graph)} - set(model.nodes)
    records = [record for record in bundle.manifest["norms"] if record["node"] not in inner]
    place = {node.name: number for number, node in enumerate(proto.graph.node)}
    records.sort(key=lambda record: place.get(record["node"], -1))
    sites = tuple(_site(record, depth, model, reference) for depth, record in enumerate(records))
    return Sites(model, reference, sites) if sites else None


def unfused_graph(path: Path) -> Graph:
    """The graph before fusing, with the norms written out that were one op already in the source.

    A residual add is inside such an op, where what follows from its sum could not be told from what follows from the
    addends.
    """
    proto = read_model(path)
    if not proto.functions and not any(node.domain == "com.microsoft" for node in all_nodes(proto.graph)):
        return Graph(proto, path.parent)
    model = ir.from_proto(proto)
    ir.passes.common.InlinePass()(model)
    split_skip_norms(model)
    return Graph(ir.to_proto(model), path.parent)


def _site(record: Mapping[str, Any], depth: int, model: Graph, reference: Graph) -> Site:
    node = model.nodes.get(record["node"])
    if node is None:
        return Site(record, depth, "", "", problem=("norm-missing", "the model has no op for this norm"))
    read = [_shared_before(name, model, reference) for name in node.input]
    skip = bool(record["residual"])
    y = _shared_after(node.output[0], model, reference)
    total = _shared_after(node.output[1], model, reference) if skip and len(node.output) > 1 else None
    scale = read[2 if skip else 1] if len(read) > (2 if skip else 1) else None
    activation = scale if scale and reference.is_computed(scale) else None
    x = total if skip else read[0]
    if y is None or x is None or (skip and not (read[0] and read[1])):
        return Site(record, depth, "", "", problem=("norm-wiring", f"{node.name} is tied to values of its own"))
    addends = (str(read[0]), str(read[1])) if skip else ()
    site = Site(record, depth, x, y, addends, activation)
    order = None if skip else _order(node.input[0], x, model)
    return replace(site, problem=_wiring(site, reference), order=order)


def _order(name: str, x: str, model: Graph) -> tuple[int, ...] | None:
    """The axes of ``x`` as ``name``, the same value behind transposes, has them; None without any."""
    order: tuple[int, ...] | None = None
    while name != x:
        node = model.producers[name]
        if node.op_type == "Transpose":
            axes = next(tuple(attribute.ints) for attribute in node.attribute if attribute.name == "perm")
            order = axes if order is None else tuple(axes[axis] for axis in order)
        name = node.input[0]
    return order


def _shared_before(name: str, model: Graph, reference: Graph) -> str | None:
    """The value that both graphs have, behind the casts and transposes that fusing put in; None if there is none."""
    while name and not reference.is_computed(name):
        node = model.producers.get(name)
        if node is None or node.op_type not in _LAYOUT_OPS:
            return None
        name = node.input[0]
    return name or None


def _shared_after(name: str, model: Graph, reference: Graph) -> str | None:
    while name and not reference.is_computed(name):
        users = [node for node in model.users.get(name, []) if node.op_type in _LAYOUT_OPS]
        if not users:
            return None
        name = users[0].output[0]
    return name or None


def _wiring(site: Site, reference: Graph) -> tuple[str, str] | None:
    """Whether, in the graph before fusing, what the op gives follows from what it reads and from nothing else."""
    for name, piece in pieces_of(site, reference).items():
        ops = {node.op_type for node in piece.part.nodes}
        if (piece.part.open and not piece.part.open_for_shape) or ops & _NOT_IN_A_NORM:
            return "norm-wiring", f"{name} follows from other values than {', '.join(piece.starts)}, which the op reads"
    return None


def is_closed(site: Site, sites: Sites) -> bool:
    """Whether the site can be run alone: nothing in it, in either graph, asks for the shape of something outside."""
    parts = [piece.part for piece in pieces_of(site, sites.reference).values()]
    return not any(part.open for part in [*parts, op_piece(site, sites.model).part])


def pieces_of(site: Site, graph: Graph) -> dict[str, Piece]:
    """In the graph before fusing: what computes each output, y from x, and x from the addends."""
    x = {site.x: ONNX_OF[site.dtype]}
    if site.activation:
        x[site.activation] = ONNX_OF[site.dtype_of(site.activation)]
    pieces = {site.y: _piece(f"norm{site.depth}", graph.between(x, [site.y]), x, site.y)}
    if site.addends:
        addends = dict.fromkeys(site.addends, ONNX_OF[site.dtype])
        pieces[site.x] = _piece(f"sum{site.depth}", graph.between(addends, [site.x]), addends, site.x)
    return pieces


def op_piece(site: Site, graph: Graph) -> Piece:
    """In the model: the op, from what it reads to all that it gives."""
    starts = {name: ONNX_OF[site.dtype_of(name)] for name in site.inputs}
    return Piece(f"op{site.depth}", graph.between(starts, site.outputs), starts, site.outputs)


def _piece(prefix: str, part: Part, starts: Mapping[str, int], end: str) -> Piece:
    return Piece(prefix, part, starts, (end,))
