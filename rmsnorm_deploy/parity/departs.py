"""Whether a module still computes what was traced from it: truth is the program's, and so is every exported file.

A module that keeps state from call to call, chooses in Python by the values it sees or by whether a size is one, or
does something else while it is exported is far from the truth. Its own error excuses nothing then, least of all itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rmsnorm_deploy.parity.judge import judge
from rmsnorm_deploy.parity.oracle import Oracle
from rmsnorm_deploy.parity.result import FAIL, Budget
from rmsnorm_deploy.parity.samples import Sample
from rmsnorm_deploy.parity.ulp import Array, UlpError, ulp_error

REASON = (
    "the module gives other values than the program that was traced from it and exported: does it keep state from call "
    "to call, choose in Python by values or by a size of one, or do something else while it is exported?"
)


def program_errors(
    oracle: Oracle,
    sample: Sample,
    truth: Mapping[str, Array],
    module: Mapping[str, tuple[str, UlpError]],
    limits: Mapping[str, Budget],
) -> dict[str, UlpError]:
    """The traced program's own error by output, in its own dtypes; empty where the module's are all within budget."""
    if all(judge(error, None, limits.get(dtype)) != FAIL for dtype, error in module.values()):
        return {}
    outputs: Sequence[Array] | None = oracle.in_own_dtypes(sample.feeds)
    named = zip(truth, outputs, strict=True) if outputs is not None else ()
    return {name: ulp_error(array, truth[name]) for name, array in named}


def departs(module: UlpError, program: UlpError, budget: Budget | None) -> bool:
    """Whether the module's error is more than the traced program's roundings make.

    NaN and infinity are not asked about: PyTorch's fast paths of attention give others where a mask hides all.
    """
    return judge(_finite(module), _finite(program), budget) == FAIL


def _finite(error: UlpError) -> UlpError:
    return replace(error, mismatched=0, max=0.0) if error.mismatched else error
