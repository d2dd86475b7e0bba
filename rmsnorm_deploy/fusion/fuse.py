"""ONNX graph in, ONNX graph out: every RMSNorm becomes one op, and every look-alike that is left gets its reason."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.fusion.cleanup import clean_up
from rmsnorm_deploy.fusion.constants import Constants
from rmsnorm_deploy.fusion.evaluate import attribute
from rmsnorm_deploy.fusion.imports import SKIP_NORM, import_graph, infer_shapes
from rmsnorm_deploy.fusion.interpret import Interpreter
from rmsnorm_deploy.fusion.meaning import Atom
from rmsnorm_deploy.fusion.prove import Proof, Prover
from rmsnorm_deploy.fusion.recognise import Candidate, Findings, recognise
from rmsnorm_deploy.fusion.records import LeftRecord, NormRecord, location_of, module_of
from rmsnorm_deploy.fusion.region import CannotProveError, extract
from rmsnorm_deploy.fusion.rewrite import Rewriter, attach_functions, can_fold, take_residual_adds, variant_of
from rmsnorm_deploy.fusion.values import shape_of
from rmsnorm_deploy.opset import MIN_OPSET, Signature, Variant, can_share_body, is_fused_op, split_epsilon


@dataclass
class FusionResult:
    """What was found in a model."""

    norms: list[NormRecord] = field(default_factory=list)
    left: list[LeftRecord] = field(default_factory=list)


def fuse(model: ir.Model, *, residual: bool = True) -> FusionResult:
    """Fuse every RMSNorm of ``model``, in place.

    Args:
        model: opset 13 or newer; weights may stay on disk, only norms' weights that must be folded are read.
        residual: also take residual adds into the norms behind them.

    Raises:
        InputError: the model's opset is older than 13.
    """
    opset = model.opset_imports.get("")
    if opset is None or opset < MIN_OPSET:
        raise InputError(f"the model's opset is {opset}; fusing needs {MIN_OPSET} or newer: convert the model first")
    import_graph(model)
    search = _search(model)
    rewriter = Rewriter(model, search.constants)
    namer = _Namer(model)
    proofs: dict[str, Proof] = {}
    sources: dict[str, ir.Node] = {}
    for candidate, proof in search.proved:
        end = candidate.output.producer()
        assert end is not None
        name = namer.name(end, candidate)
        rewriter.replace(candidate, proof.plan, name)
        proofs[name], sources[name] = proof, end
    if residual:
        RemoveUnusedNodesPass()(model)  # what a norm replaced no longer uses the sum
        take_residual_adds(model)
    attach_functions(model)
    clean_up(model)
    norms = [_record(node, proofs.get(node.name or ""), sources.get(node.name or "")) for node in _fused(model)]
    return FusionResult(norms, search.left)


def _fused(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph.all_nodes() if is_fused_op(node)]


def _search(model: ir.Model) -> _Search:
    """Look for norms; a file that says too little about its values has their shapes inferred first."""
    opset = model.opset_imports[""]
    search = _Search(opset)
    search.visit(model.graph)
    if search.interpreter.lacks_shapes and infer_shapes(model):
        search = _Search(opset)
        search.visit(model.graph)
    return search


@dataclass
class _Search:
    """Reads all graphs of a model and proves what it finds; changes nothing."""

    opset: int
    constants: Constants = field(default_factory=Constants)
    proved: list[tuple[Candidate, Proof]] = field(default_factory=list)
    left: list[LeftRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.interpreter = Interpreter(self.constants)
        self.prover = Prover()
        self._fused: set[ir.Node] = set()  # nodes that a proved norm replaces
        self._signatures: dict[Variant, Signature] = {}
        self._explained: set[Atom | ir.Node | None] = set()  # statistics that ``left`` has, and where they are taken

    def visit(self, graph: ir.Graph, around: Set[ir.Graph] = frozenset()) -> None:
        """Search a graph, which lies within the graphs ``around``, and those inside it."""
        visible = around | {graph}
        first = len(self.interpreter.reductions)
        for node in graph:
            self.interpreter.visit(node)
            for sub in subgraphs(node):
                self.visit(sub, visible)
        self._judge(graph, recognise(graph, self.interpreter, visible), first)

    def _judge(self, graph: ir.Graph, found: Findings, first: int) -> None:
        """Prove what was found in a graph; ``first`` is where its reductions begin."""
        for candidate in found.candidates:
            proof = self._prove(candidate)
            if isinstance(proof, Proof):
                self.proved.append((candidate, proof))
            else:
                self._leave(candidate.output, candidate.statistic, proof)
        for value, (statistic, reason) in found.reasons.items():
            self._leave(value, statistic, reason)
        for node, statistic in self.interpreter.reductions[first:]:
            if node.graph is graph and node not in self._fused and not self._explained & {node, statistic}:
                self._explained.add(node)
                self.left.append(_left(node, NOT_DIVIDED))
        self.left.extend(_left(node, UNSHAPED) for node in self.interpreter.unshaped[graph])
        self.left.extend(_left(node, LAYER_NORM) for node in graph if _is_layer_norm(node))
        self.left.extend(_left(node, STATISTIC_READ) for node in graph if node.op_type == SKIP_NORM)

    def _leave(self, value: ir.Value, statistic: Atom, reason: str) -> None:
        self.left.append(_left(value.producer(), reason))
        self._explained |= {statistic, statistic.node}

    def _prove(self, candidate: Candidate) -> Proof | str:
        if not can_fold(candidate, self.constants):
            return "its scale is a constant expression that is not understood"
        try:
            region = extract(candidate, self.interpreter.numbering)
        except CannotProveError as error:
            return str(error)
        proof = self.prover.prove(region)
        if isinstance(proof, Proof):
            if not self._fits(candidate, proof):
                return f"opset {self.opset} can't hold it beside the norms before it: convert the model to 18 or newer"
            self._fused.update(region.nodes)
        return proof

    def _fits(self, candidate: Candidate, proof: Proof) -> bool:
        """Whether one function body can serve this norm and those of its name before it."""
        signature = Signature(proof.plan.x_type, proof.plan.scale_type, -len(candidate.axes))
        first = self._signatures.setdefault(variant_of(candidate, proof.plan), signature)
        return can_share_body(first, signature, self.opset)


LAYER_NORM = "LayerNormalization subtracts the mean: not an RMSNorm"
STATISTIC_READ = "its statistic is read as well, which ONNX Runtime's op leaves empty"
NOT_DIVIDED = "nothing divides the tensor that was squared by the root of this mean"

UNSHAPED = "the file says nothing of the shape of what is squared, and it does not follow from the inputs'"


def _left(node: ir.Node | None, reason: str) -> LeftRecord:
    assert node is not None
    name = module_of(node) or node.name or node.outputs[0].name or ""
    return LeftRecord(name, node.name or "", reason, location_of(node))


def _is_layer_norm(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type == "LayerNormalization"


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The bodies of an If, Loop or Scan."""
    for attr in node.attributes.values():
        if attr.type == ir.AttributeType.GRAPH:
            yield attr.as_graph()
        elif attr.type == ir.AttributeType.GRAPHS:
            yield from attr.as_graphs()


class _Namer:
    """Unique names for the norms: the module's path where the exporter wrote it."""

    def __init__(self, model: ir.Model) -> None:
        self._used = {node.name for node in model.graph.all_nodes()}

    def name(self, end: ir.Node, candidate: Candidate) -> str:
        reduce = candidate.statistic.node
        base = module_of(end) or (reduce and module_of(reduce)) or (end.name and f"{end.name}_rms_norm") or "rms_norm"
        name, number = base, 1
        while name in self._used:
            number += 1
            name = f"{base}#{number}"
        self._used.add(name)
        return name


def _record(node: ir.Node, proof: Proof | None, source: ir.Node | None) -> NormRecord:
    skip = node.op_type.startswith("Skip")
    x, scale = node.inputs[0], node.inputs[2 if skip else 1]
    bias = node.inputs[3 if skip else 2] if "_bias" in node.op_type else None
    assert x is not None
    assert scale is not None
    name = node.name or ""
    stash = ir.DataType(attribute(node, "stash_type", 1))
    return NormRecord(
        name=name,
        module=module_of(source or node),
        node=name,
        op="SkipRMSNorm" if skip else "RMSNorm",
        op_type=node.op_type,
        dtype=_name_of(x.dtype),
        shape=list(shape_of(x) or []),
        axis=attribute(node, "axis", -1),
        epsilon=_readable(attribute(node, "epsilon", 1e-6), attribute(node, "epsilon_low", 0.0)),
        epsilon_mode=attribute(node, "epsilon_mode", "inside"),
        scale_order=attribute(node, "scale_order", "after_cast"),
        stash_type=_name_of(stash),
        scale=scale.name,
        scale_dtype=_name_of(scale.dtype),
        bias=bias.name if bias is not None else None,
        residual=skip,
        location=location_of(source or node),
        proof={} if proof is None else {"float64": proof.float64_error, "same_bits": proof.same_bits},
    )


def _readable(epsilon: float, low: float) -> float:
    """The decimal that a person wrote: the shortest that rounds to the same attributes, or else their sum."""
    if not low:
        return float(str(np.float32(epsilon)))
    written = float(f"{epsilon + low:.14g}")
    return written if split_epsilon(written) == (epsilon, low) else epsilon + low


def _name_of(dtype: ir.DataType | None) -> str:
    names = {"FLOAT": "float32", "DOUBLE": "float64"}
    return "" if dtype is None else names.get(dtype.name, dtype.name.lower())
