"""A token model's bundle against PyTorch's own opset-18 export of the same model, on ONNX Runtime, in one run.

Interleaved medians at one token, 16, 128, and 4 sequences of 64. With the custom-op library too, where it is built, and
with the norms left out altogether: the most that any norm could gain. Beside them, what it takes to read the weights
once and do nothing with them: the most that anything could.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rmsnorm_deploy.benchmark.contestants import onnxruntime_call
from rmsnorm_deploy.benchmark.timing import OPENINGS, Call, interleave, quantile
from rmsnorm_deploy.benchmark.twin import without_norms
from rmsnorm_deploy.cli import Parser, positive, positive_number, run_command
from rmsnorm_deploy.errors import EXIT_OK, InputError

Opener = Callable[[], Call]

SHAPES = ((1, 1), (1, 16), (1, 128), (4, 64))
TORCH, STOCK, KERNELS = "PyTorch's export", "bundle, stock ONNX Runtime", "bundle, with the custom ops"
WITHOUT, READ = "bundle, without its norms", "reading the weights alone"
BARS = {STOCK: (1.15, 1.03, 1.03, 1.03), KERNELS: (1.2, None, 1.05, None)}
TORCH_OPSET = 18


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns its exit status."""
    return run_command(argv, lambda arguments: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser("python -m rmsnorm_deploy.benchmark tokens", __doc__)
    parser.add_argument(
        "bundle", type=Path, metavar="BUNDLE", help="made from a PyTorch model that takes token ids alone"
    )
    parser.add_argument("--threads", type=positive, default=2, help="of ONNX Runtime (2)")
    parser.add_argument("--seconds", type=positive_number, default=20.0, help="of measuring a shape (20)")
    parser.add_argument(
        "--widen-bfloat16",
        action="store_true",
        help="run ops that have no bfloat16 kernel in float32, in all contestants",
    )
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
        results = [
            _time(_openers(bundle, stock, _ids(inputs[0], shape), options), shape, options.seconds) for shape in SHAPES
        ]
    if options.json:
        print(json.dumps({"threads": options.threads, "results": results}, indent=1))
    else:
        _print(results, f"{options.threads} threads{', bfloat16 widened' * options.widen_bfloat16}")
    return EXIT_OK


def _torch_export(bundle: Any, folder: Path) -> Path:
    import torch

    program = bundle.program()
    if program is None:
        raise InputError(f"{bundle.path} was not made from a PyTorch model: there is no export of PyTorch's to compare")
    with torch.no_grad():
        exported = torch.onnx.export(program, dynamo=True, opset_version=TORCH_OPSET, verbose=False)
    assert exported is not None
    exported.model.graph.inputs[0].name = bundle.manifest["signature"]["inputs"][0]["name"]
    path = folder / "torch.onnx"
    exported.save(str(path), external_data=True)
    return path


def _ids(spec: dict[str, Any], shape: tuple[int, int]) -> dict[str, Any]:
    import numpy as np

    return {spec["name"]: np.random.default_rng(0).integers(0, spec["high"], shape)}


def _openers(bundle: Any, stock: Path, feeds: dict[str, Any], options: argparse.Namespace) -> dict[str, Opener]:
    from rmsnorm_deploy.native import find_library

    def opener(path: Path, model: bytes | None = None, library: Path | None = None) -> Opener:
        return lambda: onnxruntime_call(
            model or path.read_bytes(),
            path.parent,
            feeds,
            threads=options.threads,
            library=library,
            widen_bfloat16=options.widen_bfloat16,
        )

    path, library = bundle.model_path, find_library("ort")
    return {
        TORCH: opener(stock),
        STOCK: opener(path),
        **({KERNELS: opener(path, library=library)} if library is not None else {}),
        WITHOUT: opener(path, without_norms(path)),
        READ: lambda: _reading(path, options.threads),
    }


def _reading(path: Path, threads: int) -> Call:
    """Adds up a model's weights as whole numbers, in threads that do not spin afterwards, as PyTorch's own would."""
    import numpy as np

    from rmsnorm_deploy.export.weights import DATA_FILE

    file = path.parent / DATA_FILE
    if not file.is_file():
        file = path
    parts = np.array_split(np.fromfile(file, np.int64, file.stat().st_size // 8), threads)
    pool = ThreadPoolExecutor(threads)

    def call() -> None:
        deque(pool.map(np.sum, parts), maxlen=0)

    return call


def _time(openers: dict[str, Opener], shape: tuple[int, int], seconds: float) -> dict[str, Any]:
    names = list(openers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(OPENINGS):
        print(f"timing {shape[0]} x {shape[1]} tokens, {number + 1} of {OPENINGS}", file=sys.stderr, flush=True)
        calls = {name: openers[name]() for name in names[number:] + names[:number]}
        for name, values in interleave(calls, seconds / OPENINGS).items():
            times[name] += values
        del calls
    medians = {name: quantile(values, 0.5) for name, values in times.items()}
    return {
        "shape": list(shape),
        "milliseconds": {
            name: {"median": medians[name], "p5": quantile(v, 0.05), "p95": quantile(v, 0.95), "rounds": len(v)}
            for name, v in times.items()
        },
        "speedup": {name: medians[TORCH] / medians[name] for name in times if name != TORCH},
    }


def _print(results: list[dict[str, Any]], how: str) -> None:
    print(f"ONNX Runtime, {how}; speedup over PyTorch's own opset-{TORCH_OPSET} export in the same run")
    for index, result in enumerate(results):
        batch, length = result["shape"]
        print(f"{batch} x {length} tokens: PyTorch's export {result['milliseconds'][TORCH]['median']:.1f} ms")
        for name, speedup in result["speedup"].items():
            bar = BARS[name][index] if name in BARS else None
            print(f"  {name:30} {speedup:5.2f}x" + (f"   bar {bar:.2f}x" if bar else ""))
