"""What a program takes and returns, in a form that ONNX and a file of its own can hold.

A result may be a dataclass, a named tuple or a class of the user's: a saved program names that class, and can't be read
where it is not imported. Here it is a plain tuple with the same tensors in the same order. Numbers and texts among the
results, which no ONNX graph yields, become None, as absent results are. Among the arguments, named tuples are dicts.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export.graph_signature import ConstantArgument, ExportGraphSignature

_PLAIN = (tuple, list, dict)


def with_plain_call(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program, its arguments and its result plain; ``program`` itself, perhaps the user's, stays as it is."""
    return _with_plain_inputs(_with_plain_outputs(program))


def _with_plain_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    spec = program.call_spec.in_spec
    structure = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    plain = pytree.tree_structure(_without_names(structure))
    if plain == spec:
        return program
    whole, *parts = program.module_call_graph
    assert whole.signature is not None
    return torch.export.ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[replace(whole, signature=replace(whole.signature, in_spec=plain)), *parts],
        example_inputs=_without_names(program.example_inputs),
        constants=program.constants,
        verifiers=list(program.verifiers),
    )


def has_named_tuples(arguments: Any) -> bool:
    """Whether a program of these arguments takes others in their place."""
    return pytree.tree_structure(_without_names(arguments)) != pytree.tree_structure(arguments)


def _without_names(value: Any) -> Any:
    """Tuples, lists and dicts as they are, named tuples as dicts."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _without_names(item) for name, item in zip(value._fields, value, strict=True)}
    if isinstance(value, dict):
        return {key: _without_names(item) for key, item in value.items()} if type(value) is dict else value
    return type(value)(map(_without_names, value)) if type(value) in (tuple, list) else value


def _with_plain_outputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    spec = program.call_spec.out_spec
    structure = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    plain = pytree.tree_structure(_plain(structure))
    constants = [
        i
        for i, output in enumerate(program.graph_signature.output_specs)
        if isinstance(output.arg, ConstantArgument) and output.arg.value is not None
    ]
    if plain == spec and not constants:
        return program
    graph = copy.deepcopy(program.graph)
    last = graph.output_node()
    results = list(last.args[0])
    specs = list(program.graph_signature.output_specs)
    for i in constants:
        results[i] = None
        specs[i] = replace(specs[i], arg=ConstantArgument(name=specs[i].arg.name, value=None))
    last.args = (tuple(results),)
    whole, *parts = program.module_call_graph
    assert whole.signature is not None
    return torch.export.ExportedProgram(
        root=program.graph_module,
        graph=graph,
        graph_signature=ExportGraphSignature(list(program.graph_signature.input_specs), specs),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[replace(whole, signature=replace(whole.signature, out_spec=plain)), *parts],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=list(program.verifiers),  # a program that was not decomposed yet may write in place
    )


def _plain(value: Any) -> Any:
    """Tuples, lists and dicts as they are, other containers as tuples."""
    if type(value) in _PLAIN:
        items = {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else map(_plain, value)
        return items if isinstance(value, dict) else type(value)(items)
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    node = pytree.SUPPORTED_NODES.get(type(value))
    return value if node is None else tuple(map(_plain, node.flatten_fn(value)[0]))
