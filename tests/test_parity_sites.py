"""The norms as places: truth is the model's, an own error is told from an inherited one, and the rows have power."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from parity_bundles import bundle, few_samples, norms_of_the_model

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import ParityReport, run_parity
from rmsnorm_deploy.parity.backends import BACKENDS, HeldBundle
from rmsnorm_deploy.parity.extract import Graph, assemble
from rmsnorm_deploy.parity.faults import Ward
from rmsnorm_deploy.parity.judge import norm_budget
from rmsnorm_deploy.parity.normcheck import judge_sites, open_checks, run_norms, site_error, site_truth
from rmsnorm_deploy.parity.onnx_file import read_model
from rmsnorm_deploy.parity.patient import Patient
from rmsnorm_deploy.parity.rows import NORMAL_ROWS, adversarial_rows, laid_out, split
from rmsnorm_deploy.parity.scratch import Scratch, stored_weights
from rmsnorm_deploy.parity.sites import find_sites, pieces_of

PLAIN = BACKENDS["onnxruntime"]


@pytest.fixture(scope="module")
def llama() -> Any:
    return HeldBundle(bundle("float32"))


def test_truth_at_every_norm_is_pytorchs_in_double(llama: Any) -> None:
    sites = find_sites(llama)
    assert sites is not None
    assert [site.name for site in sites.sites] == [norm["module"] for norm in llama.manifest["norms"]]
    sample = few_samples(llama)[0]
    with Scratch() as scratch:
        cases = site_truth(llama, sites, [sample], scratch)
    for site, want in zip(sites.sites, norms_of_the_model(sample), strict=True):
        np.testing.assert_allclose(
            cases[0].truth[site.y], want, rtol=1e-5, atol=1e-5
        )  # the module casts to single itself


def test_a_runtime_that_holds_a_norms_input_unrounded_is_not_blamed_for_it(tmp_path: Path) -> None:
    class Small(torch.nn.Module):
        """A norm of numbers among float16's subnormals, whose roundings it enlarges."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.norm = torch.nn.Linear(32, 32, bias=False), torch.nn.RMSNorm(32, eps=1e-6)
            with torch.no_grad():
                self.linear.weight.mul_(1e-3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.norm(self.linear(x * 2**-8))
            return result

    made = export_model(Small().half().eval(), (torch.randn(2, 5, 32).half(),), out_dir=tmp_path / "b")
    report = run_parity(made, backends=["onnxruntime", "onnxruntime-unoptimized"])
    assert report.ok
    assert max(site.own_max or 0.0 for site in report.sites) > norm_budget("float16", 32).max


def test_a_clean_bundle_passes_at_every_norm_and_says_by_how_much(llama: Any) -> None:
    report = run_parity(llama, backends=["onnxruntime", "onnxruntime-unoptimized"], samples=few_samples(llama))
    assert report.ok
    assert {site.rule for site in report.sites} == {"pass"}
    assert len(report.sites) == 2 * 5
    for site in report.sites:
        budget = norm_budget(site.dtype, 64)
        assert site.isolated_max is not None
        assert site.own_max is not None
        assert 0 < site.isolated_max < budget.max
        assert 0 < site.own_max < budget.max
        assert site.error_mean is not None
        assert site.before_mean is not None
    first, last = report.sites[0], report.sites[4]
    assert first.error_mean is not None
    assert last.error_mean is not None
    assert last.error_mean > first.error_mean  # error comes together with depth
    restored = ParityReport.from_json(json.loads(json.dumps(report.to_json())))
    assert restored.sites == report.sites


def test_a_norm_that_reads_something_wrong_is_not_wrong_itself(llama: Any, tmp_path: Path) -> None:
    patient = Patient(llama.model_path)
    patient.change_weight(patient.weight_of("o_proj"), lambda array: array * 1.001)
    (tmp_path / "model.onnx").write_bytes(patient.bytes())
    faulty = HeldBundle(llama, tmp_path / "model.onnx")
    samples = few_samples(llama)[:1]
    with Scratch() as scratch:
        checks = open_checks(faulty, scratch)
        assert checks is not None
        cases = site_truth(faulty, checks.sites, samples, scratch)
        errors = judge_sites(checks, run_norms(checks, PLAIN, cases))
    assert {error.rule for error in errors} == {"pass"}
    assert all(error.own_max is not None and error.own_max < 8 for error in errors)
    inherited = [error.error_max or 0.0 for error in errors]
    assert inherited[0] < 8
    assert min(inherited[1:]) > 1e3


def test_no_norms_or_nothing_from_before_fusing_means_no_sites(llama: Any) -> None:
    without = HeldBundle(llama)
    without.reference_path = None
    assert find_sites(without) is None
    without = HeldBundle(llama)
    without.manifest = {**llama.manifest, "norms": []}
    assert find_sites(without) is None


def test_an_op_that_the_manifest_lists_and_the_model_lacks_is_missed(llama: Any, tmp_path: Path) -> None:
    patient = Patient(llama.model_path)
    patient.norm(2).name = "another"
    (tmp_path / "model.onnx").write_bytes(patient.bytes())
    report = run_parity(
        HeldBundle(llama, tmp_path / "model.onnx"), backends=["onnxruntime"], samples=few_samples(llama)
    )
    assert not report.ok
    assert [site.rule for site in report.sites].count("norm-missing") == 1


# --- sources in which a norm and its residual add are one op already


@pytest.fixture(scope="module")
def again(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A bundle's own model.onnx, exported once more."""
    return export_model(llama.model_path, out_dir=tmp_path_factory.mktemp("again") / "b")


def test_a_bundles_own_model_exported_again_passes_at_every_norm(llama: Any, again: Any) -> None:
    assert "SkipRMSNorm" in {node.op_type for node in onnx.load(again.reference_path).graph.node}
    report = run_parity(again, samples=few_samples(again))
    assert report.ok, report.summary()
    assert len({site.norm for site in report.sites}) == len(llama.manifest["norms"])
    assert all(site.isolated_max is not None and site.own_max is not None for site in report.sites)


@pytest.mark.parametrize("fault", ["epsilon x10", "skip left out", "residual adds one operand twice"])
def test_a_fault_in_a_bundle_exported_again_is_named(again: Any, fault: str) -> None:
    with Ward(again, samples=few_samples(again), backends=["onnxruntime"]) as ward:
        outcome = ward.plant("norm", fault)
    assert outcome is not None
    assert outcome.caught
    assert outcome.named


@pytest.mark.parametrize("total", [", , , v", ""])
def test_onnx_runtimes_own_skip_norm_in_the_source_is_no_false_alarm(tmp_path: Path, total: str) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "com.microsoft": 1]>
        g (float[n, 4] x, float[n, 4] r) => (float[n, 4] z) <float[4] w = {{1, 2, 3, 4}}> {{
            y{total} = com.microsoft.SkipSimplifiedLayerNormalization <epsilon = 1e-5> (x, r, w)
            z = Mul(y, {"v" if total else "r"})
        }}""")
    onnx.save(model, tmp_path / "source.onnx")
    made = export_model(tmp_path / "source.onnx", out_dir=tmp_path / "b")
    assert len(made.manifest["norms"]) == 1
    report = run_parity(made, backends=["onnxruntime", "onnx-reference"])
    assert report.ok, report.summary()
    assert all(site.isolated_max is not None and site.before_max is not None for site in report.sites)


# --- half precision


def test_in_half_precision_another_rounding_shows_in_the_bits_alone() -> None:
    with Ward(bundle("float16"), samples=few_samples(bundle("float16"))) as ward:
        outcome = ward.plant("norm", "scale order swapped")
    assert outcome is not None
    assert outcome.caught
    assert outcome.named
    assert "rounds elsewhere" in outcome.told


def test_a_norm_that_half_precision_itself_makes_inexact_is_not_wrong() -> None:
    """An outlier pushes the rest of a normalized row among the subnormals, and a large scale shows it."""
    made = HeldBundle(bundle("float16"))
    with Scratch() as scratch:
        checks = open_checks(made, scratch)
        assert checks is not None
        values = {}
        for site in checks.usable:
            x = np.full((1, 1, 64), 1e-3, np.float16)
            x[..., 0] = 3e4
            parts = dict(zip(site.addends, (x, np.zeros_like(x)), strict=True)) if site.addends else {}
            scale = onnx.numpy_helper.to_array(checks.sites.model.array_of(str(site.record["scale"])))
            n = (x.astype(np.float32) / np.sqrt(np.mean(x.astype(np.float32) ** 2) + 1e-5)).astype(np.float16)
            values[site.depth] = {**parts, site.x: x, site.y: n * scale}
        own = checks.own(values)
        wrong = {depth: {**named} for depth, named in values.items()}
        first = checks.usable[0]
        wrong[0][first.y] = wrong[0][first.y] * np.float16(1.5)
        assert not any(own.fails(site) for site in checks.usable)
        assert checks.own(wrong).fails(first)


def test_error_of_a_wide_result_is_in_units_of_the_narrow_row() -> None:
    truth = np.array([[1.0, -2.0]])
    got = np.array([[1.0 + 2.0**-10, -2.0]], np.float32)  # one unit of float16
    assert site_error(got, truth, "float16").max == pytest.approx(1.0, rel=0.5)
    assert site_error(got, truth, "float32").max > 1e3


# --- the rows


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_no_row_can_stand_for_its_neighbour(dtype: str, width: int) -> None:
    rows = adversarial_rows(width, dtype, 1e-6, "inside").astype(np.float64)
    finite = rows[np.isfinite(rows).all(axis=1)]
    assert len(rows) > 25
    assert len(np.unique(finite, axis=0)) >= len(finite) - 4  # at width 1 one-hot rows, spikes and signs are alike
    assert (finite == 0).all(axis=1).sum() == 1


def test_rows_are_small_enough_for_epsilon_to_matter() -> None:
    for epsilon, mode in ((1e-5, "inside"), (1e-12, "inside"), (1e-3, "outside"), (1e-6, "clamp")):
        rows = adversarial_rows(64, "float32", epsilon, mode).astype(np.float64)
        rms = np.sqrt(np.mean(rows[NORMAL_ROWS : NORMAL_ROWS + 9] ** 2, axis=1))
        centre = np.sqrt(epsilon) if mode == "inside" else epsilon
        assert (rms < centre).sum() >= 3
        assert (rms > centre).sum() >= 3


def test_without_an_epsilon_no_square_vanishes_in_single_precision() -> None:
    for dtype in ("float32", "bfloat16"):
        rows = adversarial_rows(64, dtype, 0.0, "inside").astype(np.float32)
        sizes = np.abs(rows[np.isfinite(rows).all(axis=1)]).max(axis=1)
        assert sizes[sizes > 0].min() > 1e-15


def test_split_rows_sum_to_the_rows_and_neither_part_is_the_whole() -> None:
    rows = adversarial_rows(64, "float16", 1e-6, "inside")
    first, second = split(rows)
    finite = np.isfinite(rows)
    total = (first + second)[finite].astype(np.float64)
    np.testing.assert_allclose(total, rows[finite].astype(np.float64), rtol=2e-3, atol=1e-6)
    plain = rows[:NORMAL_ROWS]
    assert not np.array_equal(first[:NORMAL_ROWS], plain)
    assert (np.isnan(first + second) == np.isnan(rows)).all()


def test_rows_are_laid_out_in_free_dims_and_fill_fixed_ones() -> None:
    rows = np.arange(30.0).reshape(10, 3)
    assert laid_out(rows, ["batch", "seq", 3], -1).shape == (1, 10, 3)
    assert laid_out(rows, [2, "seq", 3], -1).shape == (2, 5, 3)
    assert laid_out(rows, [2, 8, 3], -1).shape == (2, 8, 3)
    assert laid_out(rows, [2, 2, 3], -1).shape == (2, 2, 3)
    assert laid_out(rows, ["n", 1, 3], -2).shape == (10, 1, 3)
    assert laid_out(rows, [3], -1).shape == (3,)


# --- parts of graphs


def graph_of(nodes: list[Any], inputs: list[str], outputs: list[str], folder: Path) -> Graph:
    def value(name: str) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4])

    weight = onnx.numpy_helper.from_array(np.full(4, 2, np.float32), "w")
    graph = helper.make_graph(nodes, "g", [value(n) for n in inputs], [value(n) for n in outputs], [weight])
    return Graph(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder)


def test_a_part_is_what_lies_between_and_nothing_else(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Exp", ["x"], ["a"]), node("Mul", ["a", "w"], ["b"]), node("Add", ["b", "y"], ["c"]),
        node("Neg", ["b"], ["unused"]),
    ]  # fmt: skip
    graph = graph_of(nodes, ["x", "y"], ["c"], tmp_path)
    part = graph.between(["a"], ["b"])
    assert ([n.op_type for n in part.nodes], part.constants, part.open) == (["Mul"], ("w",), ())
    part = graph.between(["a"], ["c"])
    assert ([n.op_type for n in part.nodes], part.open) == (["Mul", "Add"], ("y",))
    assert graph.between([], ["c"], limit=1).open == ("y", "b")


def test_a_type_or_a_shape_from_elsewhere_opens_no_part(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [
        node("Shape", ["y"], ["shape"]), node("Expand", ["x", "shape"], ["wide"]),
        node("CastLike", ["wide", "y"], ["like"]), node("Mul", ["like", "w"], ["z"]),
    ]  # fmt: skip
    graph = graph_of(nodes, ["x", "y"], ["z"], tmp_path)
    part = graph.between(["x"], ["z"])
    assert part.open == ()
    from rmsnorm_deploy.parity.extract import Piece

    model = assemble(graph, [Piece("p", part, {"x": TensorProto.FLOAT}, ("z",))])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(session.run(None, {"p/x": x})[0], 2 * x)


def test_a_site_ends_at_its_own_op_in_both_graphs(llama: Any) -> None:
    sites = find_sites(llama)
    assert sites is not None
    for site in sites.sites:
        for piece in pieces_of(site, sites.reference).values():
            assert not piece.part.open
            assert len(piece.part.nodes) < 20
            assert not {"MatMul", "Softmax"} & {node.op_type for node in piece.part.nodes}


# --- models on the side


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_in_another_folder_are_the_models(tmp_path: Path, dtype: Any) -> None:
    data = np.arange(12, dtype=np.float32).reshape(3, 4).astype(dtype)
    (tmp_path / "weights.bin").write_bytes(b"\0" * 64 + data.tobytes())
    tensor = onnx.numpy_helper.from_array(data, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights.bin"), ("offset", "64"), ("length", str(data.nbytes))):
        tensor.external_data.add(key=key, value=value)
    kind = tensor.data_type
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"]), helper.make_node("Identity", ["x"], ["z"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n"])],
        [tensor],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    names = {TensorProto.FLOAT: "float32", TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
    manifest = {
        "signature": {
            "parameters": [],
            "constants": [],
            "inputs": [{"name": "x", "path": "x", "dtype": "float32", "shape": ["n"]}],
            "outputs": [{"name": "z", "dtype": "float32", "shape": ["n"]}],
        },
        "dims": {"n": {"min": 0, "max": None}},
    }
    with Scratch() as scratch:
        session = scratch.tapped(
            Graph(read_model(tmp_path / "model.onnx"), tmp_path), manifest, {"y": names[kind]}
        ).session(custom_ops=False)
        got = session.run({"x": np.zeros(1, np.float32)})["y"]
        kept = scratch.path
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), data.astype(np.float32))
    assert not kept.exists()
    model.graph.initializer[0].external_data[0].value = "../weights.bin"
    with pytest.raises(InputError, match="lies outside the model's folder"):
        stored_weights(model, tmp_path)
    model.graph.initializer[0].external_data[0].value = "none.bin"
    with pytest.raises(InputError, match="does not hold the weight 'w'"):
        stored_weights(model, tmp_path)


def test_what_is_read_of_a_model_leaves_it_as_it_was(llama: Any) -> None:
    before = llama.model_path.read_bytes()
    with Scratch() as scratch:
        checks = open_checks(llama, scratch)
        assert checks is not None
        checks.isolated(PLAIN)
    assert llama.model_path.read_bytes() == before
    assert [v.name for v in read_model(llama.model_path).graph.output] == ["logits"]


def test_rows_for_a_norm_over_channels_lie_along_the_channels(tmp_path: Path) -> None:
    class PixelNorm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)

    bundle = export_model(PixelNorm(), (torch.randn(2, 6, 4, 5),), out_dir=tmp_path / "b")
    assert "Transpose" in [node.op_type for node in onnx.load(bundle.model_path).graph.node]
    result = run_parity(bundle, backends=["onnxruntime", "onnx-reference"])
    assert result.ok, result.headline
