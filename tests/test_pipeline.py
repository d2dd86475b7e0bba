"""The whole road: any source in, a bundle out that runs anywhere and computes what the model computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model, open_bundle
from rmsnorm_deploy.errors import InputError

WIDTH, EPSILON = 16, 1e-5


class Block(nn.Module):
    """Two norms, a residual, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.RMSNorm(WIDTH, eps=EPSILON), nn.RMSNorm(WIDTH, eps=EPSILON)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down.weight = self.up.weight
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.down(torch.relu(self.up(self.first(x)))))


def truth(block: Block, x: torch.Tensor) -> np.ndarray[Any, Any]:
    """The block in float64, by numpy alone."""

    def norm(v: Any, module: nn.RMSNorm) -> Any:
        weight = module.weight.detach().double().numpy()
        return v / np.sqrt((v * v).mean(-1, keepdims=True) + EPSILON) * weight

    v, w = x.double().numpy(), block.up.weight.detach().double().numpy()
    return np.asarray(norm(v + np.maximum(norm(v, block.first) @ w.T, 0) @ w.T, block.second))


def test_a_plain_onnxruntime_session_runs_the_bundle_with_another_batch_and_length(tmp_path: Path) -> None:
    block = Block()
    bundle = export_model(block, (torch.randn(1, 1, WIDTH),), out_dir=tmp_path / "b")
    session = onnxruntime.InferenceSession(bundle.model_path, providers=["CPUExecutionProvider"])
    x = torch.randn(3, 7, WIDTH)
    (y,) = session.run(None, {"x": x.numpy()})
    np.testing.assert_allclose(y, truth(block, x), rtol=2e-5, atol=5e-6)


def test_norms_and_the_residual_are_recorded_with_names_and_sources(tmp_path: Path) -> None:
    bundle = export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b")
    first, second = bundle.norms
    assert (first.name, first.op, first.scale) == ("first", "RMSNorm", "first.weight")
    assert (second.name, second.op, second.residual) == ("second", "SkipRMSNorm", True)
    assert (first.epsilon, first.shape) == (EPSILON, ["batch", "seq", WIDTH])


def test_a_tied_weight_is_stored_once(tmp_path: Path) -> None:
    bundle = export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b")
    shapes = [tuple(t.dims) for t in onnx.load(bundle.model_path).graph.initializer]
    assert shapes.count((WIDTH, WIDTH)) == 1


def test_the_reopened_bundle_runs_the_traced_program_with_its_weights(tmp_path: Path) -> None:
    block, x = Block(), torch.randn(2, 5, WIDTH)
    export_model(block, (x,), out_dir=tmp_path / "b")
    (y,) = open_bundle(tmp_path / "b").session("pytorch")(x)
    torch.testing.assert_close(y, block.eval()(x).detach(), rtol=0, atol=0)


class Wide(nn.Module):
    """Weights of more bytes than stay in the model file."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(40_000, 64)
        self.norm = nn.RMSNorm(64, eps=EPSILON)
        self.head = nn.Linear(64, 40_000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


def test_large_weights_lie_in_one_data_file_shared_by_the_program_and_the_reference(tmp_path: Path) -> None:
    model, ids = Wide(), torch.tensor([[1, 2, 39_999]])
    bundle = export_model(model, (ids,), out_dir=tmp_path / "b")
    data = (bundle.path / "model.onnx.data").stat().st_size
    assert 40_000 * 64 * 4 <= data < 40_000 * 64 * 4 + 8192
    assert (bundle.path / "program.pt2").stat().st_size < 1 << 20
    assert bundle.manifest["signature"]["inputs"][0]["high"] == 40_000
    expected = model(ids).detach()
    (from_program,) = open_bundle(bundle.path).session("pytorch")(ids)
    torch.testing.assert_close(from_program, expected, rtol=0, atol=0)
    assert bundle.reference_path is not None
    (reference,) = onnxruntime.InferenceSession(bundle.reference_path).run(None, {"ids": ids.numpy()})
    np.testing.assert_allclose(reference, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_an_onnx_file_with_external_weights_goes_through_by_path(tmp_path: Path) -> None:
    model, ids = Wide(), torch.tensor([[7, 8]])
    first = export_model(model, (ids,), out_dir=tmp_path / "first")
    second = export_model(first.reference_path, out_dir=tmp_path / "second")  # type: ignore[arg-type]
    assert [norm.op for norm in second.norms] == ["RMSNorm"]
    (y,) = second.session("onnxruntime")(ids)
    torch.testing.assert_close(y, model(ids).detach(), rtol=1e-4, atol=1e-5)


def test_exporting_an_exported_model_changes_nothing(tmp_path: Path) -> None:
    block, x = Block(), torch.randn(2, 3, WIDTH)
    first = export_model(block, (x,), out_dir=tmp_path / "first")
    second = export_model(first.model_path, out_dir=tmp_path / "second")
    kept = ("op_type", "epsilon", "residual", "scale")
    assert [[getattr(n, k) for k in kept] for n in first.norms] == [[getattr(n, k) for k in kept] for n in second.norms]
    np.testing.assert_allclose(second.session("onnxruntime")(x)[0], truth(block, x), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("how", ["module", "torchscript"])
def test_the_names_of_dims_are_lost(how: str, tmp_path: Path) -> None:
    block, x = Block().eval(), torch.randn(2, 3, WIDTH)
    model = torch.jit.trace(block, x) if how == "torchscript" else block
    bundle = export_model(model, (x,), out_dir=tmp_path / "b", dynamic_shapes={"x": {0: "rows", 1: "words"}})
    assert bundle.manifest["signature"]["inputs"][0]["shape"] == ["rows", "words", WIDTH]
    more = torch.randn(5, 7, WIDTH)
    np.testing.assert_allclose(bundle.session("onnxruntime")(more)[0], truth(block, more), rtol=1e-4, atol=1e-5)


def test_one_name_is_one_size_even_where_the_model_needs_no_such_thing(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.norm = torch.nn.RMSNorm(8, eps=1e-5)\n"
        "    def forward(self, a, b):\n"
        "        return self.norm(a), self.norm(b)\n"
        "build = Two\n"
        "def inputs():\n"
        "    return (torch.randn(5, 8), torch.randn(5, 8)), {}\n"
        "def dims():\n"
        "    return {'a': {0: 'rows'}, 'b': {0: 'rows'}}\n"
    )
    bundle = export_model(tmp_path / "recipe.py", out_dir=tmp_path / "b")
    assert [item["shape"] for item in bundle.manifest["signature"]["inputs"]] == [["rows", 8], ["rows", 8]]
    assert bundle.manifest["dims"] == {"rows": {"example": 5, "min": 0, "max": None}}
    session = bundle.session("onnxruntime")
    assert [y.shape for y in session(torch.randn(3, 8), torch.randn(3, 8))] == [(3, 8), (3, 8)]
    with pytest.raises(InputError, match="rows"):
        session(torch.randn(3, 8), torch.randn(4, 8))


@pytest.mark.parametrize("attribute", ["eps", "Epsilon"])
def test_an_attribute_that_our_op_does_not_have_is_refused_by_name(attribute: str, tmp_path: Path) -> None:
    node = onnx.helper.make_node("RMSNorm", ["x", "w"], ["y"], "norm_1", domain="rmsnorm_deploy", **{attribute: 1e-3})
    x, w, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", ["n", 8]), ("w", [8]), ("y", ["n", 8]))
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("rmsnorm_deploy", 1)]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [x, w], [y]), opset_imports=opsets, ir_version=10
    )
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(InputError, match=f"'?norm_1'? is RMSNorm with the attribute '{attribute}'"):
        export_model(tmp_path / "m.onnx", out_dir=tmp_path / "b")


def test_a_name_in_a_nested_argument_is_lost(tmp_path: Path) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)

        def forward(self, pair: tuple[torch.Tensor, torch.Tensor], extra: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.norm(pair[0] + pair[1]) + extra["c"]

    a, b, c = (torch.randn(4, WIDTH) for _ in range(3))
    rows = torch.export.Dim("rows")
    shapes = (({0: rows}, (rows, None)), {"c": ("rows", None)})
    bundle = export_model(Nested().eval(), ((a, b), {"c": c}), out_dir=tmp_path / "b", dynamic_shapes=shapes)
    assert [spec["shape"][0] for spec in bundle.manifest["signature"]["inputs"]] == ["rows"] * 3


def test_torchscript_is_frozen_at_the_size_of_the_example(tmp_path: Path) -> None:
    block, x, more = Block().eval(), torch.randn(2, 3, WIDTH), torch.randn(4, 1, WIDTH)
    bundle = export_model(torch.jit.script(block), (x,), out_dir=tmp_path / "b")
    np.testing.assert_allclose(bundle.session("onnxruntime")(more)[0], truth(block, more), rtol=1e-4, atol=1e-5)


def test_an_epsilon_of_a_float64_model_is_rounded_to_float32(tmp_path: Path) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, eps=1e-6).double()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.norm(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * 0.1

    x = torch.randn(4, WIDTH, dtype=torch.float64) * 1e-4
    bundle = export_model(Double().eval(), (x,), out_dir=tmp_path / "b")
    wide = x.numpy()
    mean = (wide * wide).mean(-1, keepdims=True)
    for got, expected in zip(
        bundle.session("onnxruntime")(x), (wide / np.sqrt(mean + 1e-6), wide / np.sqrt(mean + 1e-3) * 0.1), strict=True
    ):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14)
    assert [record.epsilon for record in bundle.norms] == [1e-6, 1e-3]


def test_frozen_torchscript_has_no_mode(tmp_path: Path) -> None:
    block, x = Block().eval(), torch.randn(2, 3, WIDTH)
    frozen = torch.jit.freeze(torch.jit.script(block))
    bundle = export_model(frozen, (x,), out_dir=tmp_path / "frozen")
    assert len(bundle.norms) == 2
    for backend in ("onnxruntime", "pytorch"):
        np.testing.assert_allclose(bundle.session(backend)(x)[0].numpy(), truth(block, x), rtol=1e-4, atol=1e-5)


def test_torchscript_and_a_program_give_the_same_as_the_module(tmp_path: Path) -> None:
    block, x = Block().eval(), torch.randn(2, 3, WIDTH)
    scripted = torch.jit.trace(block, x)
    program = torch.export.export(block, (x,))
    for name, source in (("script", scripted), ("program", program)):
        args = (x,) if name == "script" else ()
        bundle = export_model(source, args, out_dir=tmp_path / name)
        assert len(bundle.norms) == 2, name
        np.testing.assert_allclose(bundle.session("onnxruntime")(x)[0], truth(block, x), rtol=2e-5, atol=5e-6)


class Nested(nn.Module):
    """Keyword, dict, tuple, None, scalar and unused arguments; an output that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)

    def forward(
        self, hidden: Any, pair: Any, *, extras: Any, mask: Any = None, unused: Any = None, scale: float = 2.0
    ) -> Any:
        y = self.norm(hidden * scale + pair[0] - pair[1] + extras["b"])
        y = y if mask is None else y * mask
        return {"last": y, "aux": (extras["a"], y.sum(-1))}


def test_nested_arguments_keep_their_paths_as_names_and_constants_are_recorded(tmp_path: Path) -> None:
    a, b, c, d, e, unused = (torch.randn(3, WIDTH) for _ in range(6))
    kwargs = {"extras": {"b": d, "a": e}, "unused": unused, "scale": 0.5}
    bundle = export_model(Nested(), (a, (b, c)), kwargs, out_dir=tmp_path / "b")
    signature = bundle.manifest["signature"]
    names = ["hidden", "pair.0", "pair.1", "extras.b", "extras.a", "unused"]
    assert [item["name"] for item in signature["inputs"]] == names
    assert [item["name"] for item in signature["outputs"]] == ["last", "aux.0", "aux.1"]
    assert {"path": "scale", "value": 0.5} in signature["constants"]
    outputs = bundle.session("onnxruntime")(a, (b, c), **kwargs)
    for got, want in zip(outputs, torch.utils._pytree.tree_leaves(Nested()(a, (b, c), **kwargs)), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_module_changes_precision_and_the_users_own_keeps_its(precision: str, tmp_path: Path) -> None:
    block = Block()
    bundle = export_model(block, (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b", precision=precision)
    expected = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[precision]
    assert [bundle.manifest["signature"][side][0]["dtype"] for side in ("inputs", "outputs")] == [expected] * 2
    assert block.up.weight.dtype == torch.float32


def test_precision_of_a_file_with_fixed_dtypes_is_refused(tmp_path: Path) -> None:
    first = export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "first")
    with pytest.raises(InputError, match="built in"):
        export_model(first.model_path, out_dir=tmp_path / "second", precision="fp16")


def test_nothing_is_left_under_the_bundles_name_when_the_export_fails(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return x
            return -x

    with pytest.raises(InputError, match="can't trace Broken") as refused:
        export_model(Broken(), (torch.randn(2, 3),), out_dir=tmp_path / "b")
    says = str(refused.value)
    assert re.search(r"test_pipeline\.py:\d+ `if x\.sum\(\) > 0:`: it asks for the value of a tensor", says)
    assert "\n" not in says
    assert list(tmp_path.iterdir()) == []


def test_an_existing_bundle_is_replaced_only_when_told_to(tmp_path: Path) -> None:
    x = torch.randn(2, 3, WIDTH)
    export_model(Block(), (x,), out_dir=tmp_path / "b")
    with pytest.raises(InputError, match="is there already"):
        export_model(Block(), (x,), out_dir=tmp_path / "b")
    export_model(Block(), (x,), out_dir=tmp_path / "b", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_folder_that_is_no_bundle_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="nothing in it is touched, name another"):
        export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b", force=True)
    assert (tmp_path / "b" / "thesis.tex").read_text() == "years of work"


def test_the_opset_in_the_file_is_the_one_asked_for(tmp_path: Path) -> None:
    for opset in (18, 20, 22):
        bundle = export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / f"b{opset}", opset=opset)
        imports = {entry.domain: entry.version for entry in onnx.load(bundle.model_path).opset_import}
        assert imports[""] == opset
    with pytest.raises(InputError, match="18 and newer"):
        export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b13", opset=13)


def test_what_is_no_bundle_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no manifest\.json"):
        open_bundle(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(InputError, match="format 99"):
        open_bundle(tmp_path)


def test_a_weights_index_that_points_outside_the_bundle_is_refused(tmp_path: Path) -> None:
    bundle = export_model(Wide(), (torch.tensor([[1]]),), out_dir=tmp_path / "b")
    index = bundle.path / "program.weights.json"
    places = json.loads(index.read_text())
    for place in places.values():
        place["file"] = "../../etc/passwd"
    index.write_text(json.dumps(places))
    with pytest.raises(InputError, match="outside the bundle"):
        open_bundle(bundle.path).program()


def test_dynamic_batch_from_an_example_of_one_and_a_broadcast_input_stay_right(tmp_path: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)

        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return self.norm(x + position)

    model = Positions()
    bundle = export_model(model, (torch.randn(3, 4, WIDTH), torch.randn(1, 4, WIDTH)), out_dir=tmp_path / "b")
    x, position = torch.randn(5, 4, WIDTH), torch.randn(1, 4, WIDTH)
    torch.testing.assert_close(
        bundle.session("onnxruntime")(x, position)[0], model(x, position).detach(), rtol=2e-5, atol=5e-6
    )


def test_an_epsilon_of_1e8_survives_and_a_zero_row_stays_zero(tmp_path: Path) -> None:
    model = nn.RMSNorm(WIDTH, eps=1e-8)
    bundle = export_model(model, (torch.randn(2, WIDTH),), out_dir=tmp_path / "b")
    (y,) = bundle.session("onnxruntime")(torch.zeros(4, WIDTH))
    assert bundle.norms[0].epsilon == 1e-8
    assert torch.equal(y, torch.zeros(4, WIDTH))


def test_parity_of_a_cast_model_is_judged_against_the_cast_model(tmp_path: Path) -> None:
    bundle = export_model(Block(), (torch.randn(2, 3, WIDTH),), out_dir=tmp_path / "b", precision="fp16", check=True)
    parity = json.loads((bundle.path / "parity.json").read_text())
    assert parity["ok"], parity
    assert bundle.session("pytorch")(torch.randn(2, 3, WIDTH).half())[0].dtype == torch.float16
