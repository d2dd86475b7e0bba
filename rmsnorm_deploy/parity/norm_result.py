"""What parity found at the norms: plain data. The rule ids in `RULES` are stable."""

from __future__ import annotations

from dataclasses import dataclass, field

RULES = {
    "pass": "the norm computes what the model's own norm computed",
    "norm-isolated": "the op alone, on rows made to tell norms apart, is not the model's norm",
    "norm-own-input": "in the running model the op is off on the very input that it reads",
    "norm-rounding": "in half precision the op rounds elsewhere than the model's norm, or has another scale",
    "norm-wiring": "the op reads or gives other values than the model's norm",
    "norm-missing": "the model has no op where the manifest lists one",
    "span": "the first wrong value is computed between two norms",
    "tail": "every norm is right, and the model goes wrong after the last one",
    "refused": "the model does not run an input that it took before export",
    "nothing": "no difference was found at the norms",
}


@dataclass(frozen=True)
class SiteError:
    """One norm in one backend; errors are in ULPs of the norm's dtype, the worst over the samples.

    ``error`` is against the float64 run of the whole model, ``before`` the same before fusing in the model's dtypes,
    ``own`` given the norm's actual input, ``isolated`` alone on rows of its own. None where it could not be had. The
    verdict is on the norm by itself: ``error`` includes what it inherits.
    """

    backend: str
    norm: str
    depth: int
    dtype: str
    verdict: str
    rule: str
    reason: str | None = None
    error_max: float | None = None
    error_mean: float | None = None
    own_max: float | None = None
    own_mean: float | None = None
    isolated_max: float | None = None
    isolated_mean: float | None = None
    before_max: float | None = None
    before_mean: float | None = None


@dataclass(frozen=True)
class Finding:
    """Where one backend first differs, as bisection names it.

    Attributes:
        rule: one of `RULES`.
        norm: the module path of the norm at fault, or None when the fault is not in a norm.
        after, before: the norms between which it is, where it is between two; None is the model's input or output.
        value: the first wrong value between them, by its name in the graph.
        statistics: of the norm's actual input: rms_min, rms_max, zero_rows, rows, max.
        own_max, own_mean: the norm's own error, on its actual input or on rows of its own, in ULPs.
        inherited_max, inherited_mean: the error of its input, in ULPs.
        others: more norms that are wrong by themselves.
        saved: names of files with the norm or the span alone and its input, in the folder asked for.
    """

    backend: str
    rule: str
    text: str
    sample: str | None = None
    norm: str | None = None
    after: str | None = None
    before: str | None = None
    value: str | None = None
    statistics: dict[str, float] = field(default_factory=dict)
    own_max: float | None = None
    own_mean: float | None = None
    inherited_max: float | None = None
    inherited_mean: float | None = None
    others: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
