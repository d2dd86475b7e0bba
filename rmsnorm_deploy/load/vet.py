"""Looks through a .pt2 before torch does.

A torch.export program is read by evaluating parts of its JSON: sizes go through sympy's ``eval``, guards and argument
names into generated Python source, an operator's name through ``getattr`` from ``torch``, and some constants through
pickle. Each of those is held here to what torch itself writes; what goes beyond is refused by name.
"""

from __future__ import annotations

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load.trust import words

_NATIVE = ("data/aotinductor/", "executorch/", "mtia")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")
# Calls in sizes and guards: sympy's and torch's own functions, by name.
_FUNCTIONS = words(
    "Symbol Integer Float Rational Add Mul Pow Mod Max Min Abs And Or Not Eq Ne Lt Le Gt Ge Equality Unequality "
    "LessThan StrictLessThan GreaterThan StrictGreaterThan Piecewise ITE floor ceiling log sqrt Where FloorDiv "
    "ModularIndexing PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow "
    "FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal "
    "ToFloat Identity max min abs size stride storage_offset item math cast_symbool_to_symint_guardless isnan"
)
_CONSTANTS = words("L inf nan oo int_oo true false True False None math pi E zoo")
_NODES = (
    ast.Expression, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Constant, ast.Subscript,
    ast.Attribute, ast.keyword, ast.IfExp, ast.Tuple, ast.Load, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_OPERATORS = words(
    "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor not_ invert lshift rshift "
    "getitem truth index is_ is_not"
)


def vet_program(path: Path) -> None:
    """Raise InputError when a .pt2 would do more on loading than describe a graph and hold tensors."""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            inner = member.split("/", 1)[-1]
            if inner.startswith(_NATIVE):
                raise _refused(path, f"it carries compiled code ({inner})")
            if "/opaque_obj_" in f"/{inner}" or inner.startswith("data/constants/opaque"):
                raise _refused(path, f"it carries a pickled Python object ({inner})")
            if inner.startswith("models/") or member == "serialized_exported_program.json":
                _vet_json(path, _parse(path, archive.read(member)))


def _parse(path: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise InputError(f"{path}: a damaged program: its graph is not JSON") from None


def _vet_json(path: Path, document: Any) -> None:
    for key, value in _fields(document):
        problem = _problem(key, value)
        if problem:
            raise _refused(path, problem)


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth. What a node is made from is free text and never evaluated."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                yield key, inner
                if key != "metadata":
                    stack.append(inner)
        elif isinstance(item, list):
            stack.extend(item)


def _problem(key: str, value: Any) -> str | None:
    if key in ("target", "as_operator") and isinstance(value, str):
        return None if _is_operator(value) else f"it calls {value!r}, which is no operator"
    if key == "expr_str" and isinstance(value, str):
        return None if _is_arithmetic(value) else f"a size is {value[:80]!r}, which is no arithmetic"
    if key == "guards_code" and isinstance(value, list):
        bad = [v for v in value if not isinstance(v, str) or not _is_arithmetic(v)]
        return f"a guard is {str(bad[0])[:80]!r}, which is no arithmetic" if bad else None
    if key == "range_constraints" and isinstance(value, dict):
        bad = [k for k in value if not _is_arithmetic(k)]
        return f"a range is of {bad[0][:80]!r}, which is no symbol" if bad else None
    if key == "forward_arg_names" and isinstance(value, list):
        bad = [v for v in value if not isinstance(v, str) or not v.isidentifier()]
        return f"an argument is named {bad[0]!r}" if bad else None
    if key in ("in_spec", "out_spec") and isinstance(value, str):
        return _keyword_problem(value) if key == "in_spec" and value else None
    if key == "name" and isinstance(value, str) and value and not _IDENTIFIER.fullmatch(value):
        return f"a value is named {value[:80]!r}"
    return None


def _keyword_problem(spec: str) -> str | None:
    """The keywords of the call become names in generated source."""
    try:
        children = json.loads(spec)[1]["children_spec"]
        words = json.loads(children[1]["context"]) if len(children) == 2 and children[1]["context"] else []
    except (ValueError, KeyError, IndexError, TypeError):
        return f"its call is described by {spec[:80]!r}"
    bad = [w for w in words if not isinstance(w, str) or not w.isidentifier()] if isinstance(words, list) else [words]
    return f"an argument is named {bad[0]!r}" if bad else None


def _is_operator(target: str) -> bool:
    """torch.ops.NAMESPACE.OP[.OVERLOAD] that is registered, arithmetic of Python, or torch's arithmetic on sizes."""
    parts = target.split(".")
    if parts[0] == "_operator":
        return len(parts) == 2 and parts[1] in _OPERATORS
    if parts[0] == "math":
        return len(parts) == 2 and parts[1].isidentifier() and not parts[1].startswith("_")
    if parts[0] != "torch":
        return False
    if len(parts) == 2:
        return re.fullmatch(r"_?sym_\w+", parts[1]) is not None
    if parts[1] != "ops" or len(parts) not in (4, 5):
        return False
    found: Any = torch.ops
    for part in parts[2:]:
        found = getattr(found, part, None)
    return isinstance(found, torch._ops.OperatorBase | torch._ops.OpOverloadPacket)


def _is_arithmetic(text: str) -> bool:
    """An expression of numbers, symbols and known functions; no attribute but those of a size, no other name."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _NODES) and _plain(node) for node in nodes)


def _plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in _FUNCTIONS or node.attr in _CONSTANTS
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or node.id in _CONSTANTS or re.fullmatch(r"z?[a-z]{1,3}\d+", node.id) is not None
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute | ast.Name)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.fullmatch(r"[\w.\-]*", node.value) is not None
    return True


def _refused(path: Path, why: str) -> InputError:
    return InputError(f"{path}: refused: {why}; a program of torch.export needs nothing of the kind")
