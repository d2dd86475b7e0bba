"""Where: a guard around a statistic, such as ``where(m > eps, m, eps)`` or ``where(m == 0, 1, r)``.

A guard that compares with its own constant is a floor. Any other is believed never to matter; the proof, whose rows
have zeros, tiny numbers and NaN, tells those apart that do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from rmsnorm_deploy.fusion.meaning import Meaning, broadcast

if TYPE_CHECKING:
    from rmsnorm_deploy.fusion.interpret import Interpreter

_ABOVE, _BELOW = ("Greater", "GreaterOrEqual"), ("Less", "LessOrEqual")


def guarded(interpreter: Interpreter, node: ir.Node) -> Meaning | None:
    """What a Where means that chooses between a statistic and a constant; None for any other."""
    condition, yes, no = node.inputs
    if condition is None or yes is None or no is None:
        return None
    for chosen, other, when in ((yes, no, True), (no, yes, False)):
        m, amount = interpreter.of(chosen), interpreter.amount(other)
        if m.only_statistic() is None or amount is None:
            continue
        shape = broadcast(broadcast(m.shape, interpreter.of(other).shape), interpreter.of(condition).shape)
        interpreter.lacks_shapes |= shape is None
        if shape is None or shape != m.shape:
            continue
        return interpreter.floored(m, amount) if _is_floor(interpreter, condition, m, amount, when) else m
    return None


def _is_floor(interpreter: Interpreter, condition: ir.Value, m: Meaning, amount: float, when: bool) -> bool:
    """Whether ``m`` is chosen exactly where it is above ``amount``."""
    node = condition.producer()
    if node is None or node.op_type not in (*_ABOVE, *_BELOW):
        return False
    for index, above in ((0, _ABOVE), (1, _BELOW)):
        value, limit = node.inputs[index], interpreter.amount(node.inputs[1 - index])
        if value is not None and limit == amount and interpreter.of(value).key == m.key:
            return (node.op_type in above) == when
    return False
