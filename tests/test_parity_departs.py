"""A module that does other than the program traced from it is not called the same model: the program is what ships."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity_fakes import edit_model, make_bundle
from torch import Tensor, nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.parity import run_parity
from rmsnorm_deploy.parity.departs import REASON, departs
from rmsnorm_deploy.parity.ulp import UlpError

HERE = ["pytorch", "onnxruntime"]
DIMS = {"batch": (0,)}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(16, eps=1e-6)


class CountsInABuffer(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * self.calls


class CountsInPython(Normed):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x) * self.calls


class OtherWhileExported(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (1.0 if torch.compiler.is_compiling() else 1.001)


class WithNumpy(Normed):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * (1.0 if torch.compiler.is_compiling() else float(np.abs(x.numpy()).max()))


class KeepsWhatItNeverReads(Normed):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x)


class Coarse(Normed):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(self.norm(x), torch.eye(16)).float()


class WritesToItsInput(Normed):
    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x.add_(1)
        return normed + x


@pytest.mark.parametrize("model", [CountsInABuffer, CountsInPython, OtherWhileExported, WithNumpy])
@pytest.mark.parametrize("backends", [HERE, ["onnxruntime"]])
def test_a_module_that_departs_from_its_program_fails(tmp_path: Path, model: type, backends: list[str]) -> None:
    bundle = export_model(model(), (torch.randn(2, 16),), out_dir=tmp_path / "b")
    report = run_parity(bundle, backends=backends)
    assert not report.ok
    assert report.backend("pytorch").reason == REASON
    assert report.backend("onnxruntime").verdict == "pass", "the file is what the program is"


@pytest.mark.parametrize("model", [KeepsWhatItNeverReads, Coarse, WritesToItsInput])
def test_a_module_that_is_its_program_passes(tmp_path: Path, model: type) -> None:
    report = run_parity(make_bundle(tmp_path, model(), (torch.randn(2, 16),), dims=DIMS), backends=["pytorch"])
    assert report.ok
    error = report.backend("pytorch").error
    assert error is not None
    assert (error.mean > 1000) == (model is Coarse), "coarse by its dtypes, which the program has too"


def test_an_array_passed_by_name_is_not_written_to(tmp_path: Path) -> None:
    x = np.ones((2, 16), np.float32)
    make_bundle(tmp_path, WritesToItsInput(), (torch.randn(2, 16),), dims=DIMS).session("pytorch").run({"x": x})
    assert (x == 1).all()


def test_a_nan_of_the_module_alone_is_no_departure() -> None:
    exact = UlpError(max=1.0, p99=1.0, mean=0.3, elements=8)
    some_nan = UlpError(max=float("inf"), p99=1.0, mean=0.3, elements=8, mismatched=2)
    assert not departs(some_nan, exact, None)
    assert departs(UlpError(max=9e6, p99=9e6, mean=5e6, elements=8), exact, None)


@pytest.mark.parametrize("model", [CountsInABuffer, Coarse])
def test_a_buffer_that_is_written_to_is_noted(tmp_path: Path, model: type) -> None:
    notes = export_model(model(), (torch.randn(2, 16),), out_dir=tmp_path / "b").manifest["notes"]
    told = [note for note in notes if note.startswith("the model writes to calls: the file begins every call")]
    assert len(told) == (model is CountsInABuffer)


class Padded(Normed):
    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        return self.norm(x).masked_fill(padding_mask[..., None], 0.0)


class NaNWhereHidden(Normed):
    """Bool masks may say what is hidden as well as what is seen: the first query sees nothing in one of the two."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        size = x.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool).tril() & ~mask[:, None]
        return torch.softmax(x @ self.norm(x).mT + torch.where(seen, 0.0, float("-inf")), -1)


@pytest.mark.parametrize("model", [Padded, NaNWhereHidden])
def test_masks_are_judged_where_they_hide_something(tmp_path: Path, model: type) -> None:
    mask = torch.zeros(2, 6, dtype=torch.bool)
    bundle = export_model(model(), (torch.randn(2, 6, 16), mask), out_dir=tmp_path / "b")
    report = run_parity(bundle, backends=HERE)
    assert report.ok
    assert any(sample.name == "masks in part" and not sample.skipped for sample in report.samples)


def test_a_mask_that_is_ignored_is_caught(tmp_path: Path) -> None:
    args = (torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool))
    bundle = export_model(Padded(), args, out_dir=tmp_path / "b")

    def ignore(model: ir.Model) -> None:
        for node in model.graph.all_nodes():
            if node.op_type == "Where":
                node.outputs[0].replace_all_uses_with(node.inputs[2], replace_graph_outputs=True)

    edit_model(bundle, ignore)
    assert run_parity(bundle, backends=["onnxruntime"]).backend("onnxruntime").verdict == "fail"
