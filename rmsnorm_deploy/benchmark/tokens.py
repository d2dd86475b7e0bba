"""A token model's bundle against PyTorch's own opset-18 export of the same model, on ONNX Runtime, in one run.

Interleaved medians at one token, 16, 128, and 4 sequences of 64. With the custom-op library too, where it is built.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rmsnorm_deploy.benchmark.timing import interleave, quantile
from rmsnorm_deploy.errors import EXIT_OK, DeployError, InputError

SHAPES = ((1, 1), (1, 16), (1, 128), (4, 64))
TORCH, STOCK, KERNELS = "PyTorch's export", "bundle, stock ONNX Runtime", "bundle, with the custom ops"
BARS = {STOCK: (1.15, 1.03, 1.03, 1.03), KERNELS: (1.2, None, 1.05, None)}
TORCH_OPSET = 18


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except DeployError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rmsnorm_deploy.benchmark tokens", description=__doc__)
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="made from a PyTorch model that takes token ids alone"
    )
    parser.add_argument("--threads", type=int, default=2, help="of ONNX Runtime (2)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of measuring a shape (20)")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    return parser


def _run(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.bundle import open_bundle

    bundle = open_bundle(options.bundle)
    inputs = bundle.manifest["signature"]["inputs"]
    if len(inputs) != 1 or not inputs[0]["high"]:
        raise InputError(f"{options.bundle}: this benchmark takes a model whose one input is token ids")
    with tempfile.TemporaryDirectory() as folder:
        print("exporting with PyTorch alone", file=sys.stderr, flush=True)
        stock = _torch_export(bundle, Path(folder))
        sessions = _sessions(bundle, stock, options.threads)
        results = [_time(sessions, inputs[0], shape, options.seconds) for shape in SHAPES]
    if options.json:
        print(json.dumps({"threads": options.threads, "results": results}, indent=1))
    else:
        _print(results, options.threads)
    return EXIT_OK


def _torch_export(bundle: Any, folder: Path) -> Path:
    import torch

    program = bundle.program()
    if program is None:
        raise InputError(f"{bundle.path} was not made from a PyTorch model: there is no export of PyTorch's to compare")
    with torch.no_grad():
        exported = torch.onnx.export(program, dynamo=True, opset_version=TORCH_OPSET, verbose=False)
    assert exported is not None
    path = folder / "torch.onnx"
    exported.save(str(path), external_data=True)
    return path


def _sessions(bundle: Any, stock: Path, threads: int) -> dict[str, Any]:
    import onnxruntime

    from rmsnorm_deploy.native import find_library

    def session(path: Path, library: Path | None = None) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        if library is not None:
            options.register_custom_ops_library(str(library))
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    sessions = {TORCH: session(stock), STOCK: session(bundle.model_path)}
    library = find_library("ort")
    if library is not None:
        sessions[KERNELS] = session(bundle.model_path, library)
    return sessions


def _time(sessions: dict[str, Any], spec: dict[str, Any], shape: tuple[int, int], seconds: float) -> dict[str, Any]:
    import numpy as np

    ids = np.random.default_rng(0).integers(0, spec["high"], shape)
    print(f"timing {shape[0]} x {shape[1]} tokens", file=sys.stderr, flush=True)

    def call(session: Any) -> Callable[[], Any]:
        feeds = {session.get_inputs()[0].name: ids}
        return lambda: session.run(None, feeds)

    times = interleave({name: call(session) for name, session in sessions.items()}, seconds)
    medians = {name: quantile(values, 0.5) for name, values in times.items()}
    return {
        "shape": list(shape),
        "milliseconds": {
            name: {"median": medians[name], "p5": quantile(v, 0.05), "p95": quantile(v, 0.95), "rounds": len(v)}
            for name, v in times.items()
        },
        "speedup": {name: medians[TORCH] / medians[name] for name in times if name != TORCH},
    }


def _print(results: list[dict[str, Any]], threads: int) -> None:
    print(f"ONNX Runtime, {threads} threads; speedup over PyTorch's own opset-{TORCH_OPSET} export in the same run")
    for index, result in enumerate(results):
        batch, length = result["shape"]
        print(f"{batch} x {length} tokens: PyTorch's export {result['milliseconds'][TORCH]['median']:.1f} ms")
        for name, speedup in result["speedup"].items():
            bar = BARS[name][index]
            print(f"  {name:30} {speedup:5.2f}x" + (f"   bar {bar:.2f}x" if bar else ""))
