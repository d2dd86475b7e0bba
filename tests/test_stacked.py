"""Weights are stored as products read them, once, and found by their own names all the same."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model, open_bundle
from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.export.weights import INLINE_TOTAL, described

WIDE = 1024


class Attention(nn.Module):
    """A norm, and queries, keys and values of what it gives."""

    def __init__(self, width: int, heads: int = 4, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias)
        self.k, self.v = (nn.Linear(width, width // 2, bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = self.norm(x)
        q, k, v = (p(n).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: torch.Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return result


def exported(model: nn.Module, folder: Path, width: int, precision: str = "keep") -> Bundle:
    x = torch.randn(2, 3, width)
    export_model(model.eval(), (x,), out_dir=folder, precision=precision)
    return open_bundle(folder)


def stacked(bundle: Bundle) -> dict[str, list[tuple[str, int, int]]]:
    """For each stacked initializer, the weights it is made of, with their first columns and numbers of them."""
    graph = onnx.load(bundle.model_path, load_external_data=False).graph
    metadata = {t.name: {entry.key: entry.value for entry in t.metadata_props} for t in graph.initializer}
    found = {name: [(p.name, p.column, p.rows) for p in described(entries)] for name, entries in metadata.items()}
    return {name: parts for name, parts in found.items() if parts}


def ops(bundle: Bundle) -> list[str]:
    return [node.op_type for node in onnx.load(bundle.model_path, load_external_data=False).graph.node]


def test_a_joint_projection_says_which_columns_are_whose(tmp_path: Path) -> None:
    assert stacked(exported(Attention(32), tmp_path / "b", 32)) == {
        "q+k+v.weight.T": [("q.weight", 0, 32), ("k.weight", 32, 16), ("v.weight", 48, 16)],
        "out.weight.T": [("out.weight", 0, 32)],
    }


@pytest.mark.parametrize("precision", ["keep", "fp16", "bf16"])
@pytest.mark.parametrize("width", [32, WIDE])
def test_each_weight_is_found_bit_for_bit_in_the_file(width: int, precision: str, tmp_path: Path) -> None:
    model = Attention(width, bias=True)
    bundle = exported(model, tmp_path / "b", width, precision)
    initializers = {t.name: t for t in onnx.load(bundle.model_path).graph.initializer}
    state = {name: w.detach() for name, w in model.named_parameters()}
    dtype = {"keep": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    for name, parts in stacked(bundle).items():
        array = onnx.numpy_helper.to_array(initializers[name])
        for weight, column, rows in parts:
            found = torch.from_numpy(array[:, column : column + rows].T.astype(np.float32))
            assert torch.equal(found, state[weight].to(dtype).float()), weight


def test_the_program_reads_its_weights_out_of_the_stacked_ones(tmp_path: Path) -> None:
    model = Attention(WIDE)
    bundle = exported(model, tmp_path / "b", WIDE)
    total = sum(w.numel() * 4 for w in model.parameters())
    assert total > INLINE_TOTAL
    assert (bundle.path / "model.onnx.data").stat().st_size < total + 4096 * 8
    assert (bundle.path / "program.pt2").stat().st_size < total // 8
    places = json.loads((bundle.path / "program.weights.json").read_text())
    assert {name: place["strides"] for name, place in places.items()} == {
        "norm.weight": [1],
        "q.weight": [1, 2 * WIDE],
        "k.weight": [1, 2 * WIDE],
        "v.weight": [1, 2 * WIDE],
        "out.weight": [1, WIDE],
    }
    program = bundle.program()
    assert program is not None
    for name, weight in model.named_parameters():
        assert torch.equal(program.state_dict[name], weight), name


def test_sessions_give_what_the_model_gives(tmp_path: Path) -> None:
    model = Attention(WIDE, bias=True)
    bundle = exported(model, tmp_path / "b", WIDE)
    for shape in ((1, 1, WIDE), (3, 5, WIDE)):
        x = torch.randn(shape)
        expected = model.double()(x.double()).float()
        model.float()
        for backend in ("onnxruntime", "pytorch"):
            torch.testing.assert_close(bundle.session(backend)(x)[0], expected.detach(), rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """An embedding whose table is the last product's matrix."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 16))
        self.norm, self.twice = nn.RMSNorm(16), twice

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.norm(nn.functional.embedding(ids, self.table)) @ self.table.T
        result: torch.Tensor = self.norm(y @ self.table) @ self.table.T if self.twice else y
        return result


@pytest.mark.parametrize("twice", [False, True])
def test_a_weight_that_others_read_too_is_stored_once_and_as_it_was(twice: bool, tmp_path: Path) -> None:
    model = Tied(twice).eval()
    export_model(model, (torch.tensor([[1, 2]]),), out_dir=tmp_path / "b")
    bundle = open_bundle(tmp_path / "b")
    assert stacked(bundle) == {}
    names = [t.name for t in onnx.load(bundle.model_path).graph.initializer if len(t.dims) == 2 and t.dims[0] > 1]
    assert names == ["table"]


def test_a_bundle_of_weights_in_rows_is_still_read(tmp_path: Path) -> None:
    linear = nn.Linear(WIDE, 3 * WIDE)
    bundle = exported(nn.Sequential(nn.RMSNorm(WIDE), linear), tmp_path / "b", WIDE)
    rows = linear.weight.detach().numpy()
    index, data = bundle.path / "program.weights.json", bundle.path / "model.onnx.data"
    places = json.loads(index.read_text())
    places["1.weight"] |= {"offset": data.stat().st_size, "length": rows.nbytes}
    with data.open("ab") as file:
        file.write(rows.tobytes())
    for place in places.values():
        del place["strides"]
    index.write_text(json.dumps(places))
    manifest = bundle.path / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 1}))
    program = open_bundle(bundle.path).program()
    assert program is not None
    assert torch.equal(program.state_dict["1.weight"], linear.weight)
