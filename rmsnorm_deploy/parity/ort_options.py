"""ONNX Runtime's options for sessions that run a few times: what they compute is the same with any of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rmsnorm_deploy.parity.ulp import Array
from rmsnorm_deploy.runtime.optional import load_module
from rmsnorm_deploy.runtime.tensors import ort_value


def sparing_options() -> Any:
    """`onnxruntime.SessionOptions` with which threads that wait for work sleep: awake they burn a third of the
    processor time of a run."""
    ort = load_module("onnxruntime", "pip install onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it logs as errors arrives as exceptions too
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def options_with(weights: Mapping[str, Array], *, once: bool = False) -> Any:
    """The same, with ``weights`` that lie outside the model's folder: ONNX Runtime follows no link out of it, and
    others take a hard link for an attack.

    ``once``: weights are not rearranged for faster products, which takes longer than one run gains.
    """
    options = sparing_options()
    options.enable_cpu_mem_arena = False  # it grows in powers of two, and one result that is kept would keep all of it
    if once:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if weights:
        ort = load_module("onnxruntime", "pip install onnxruntime")
        options.add_external_initializers(list(weights), [ort_value(ort, array) for array in weights.values()])
    return options
