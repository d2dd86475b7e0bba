"""Sessions: what must not break between a user's call and the arrays that come back."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch._subclasses.fake_tensor import FakeTensorMode

from rmsnorm_deploy import native
from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.runtime import open_session
from rmsnorm_deploy.runtime.binding import bind_call, bind_parameters, flatten
from rmsnorm_deploy.runtime.ort_providers import resolve_providers, tensorrt_options
from rmsnorm_deploy.runtime.pytorch_session import arguments_like, nest
from rmsnorm_deploy.runtime.signature import Signature, TensorSpec, check_feeds
from rmsnorm_deploy.runtime.tensors import DTYPES, buffer_of, to_numpy, to_torch

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


@dataclass
class FakeBundle:
    """The part of a bundle that sessions read, made by hand."""

    path: Path
    manifest: dict[str, Any]
    eager: torch.nn.Module | None = None
    traced: Any = None
    model_path: Path = field(init=False)

    def __post_init__(self) -> None:
        self.model_path = self.path / "model.onnx"

    def program(self) -> Any:
        return self.traced


def tensor(
    name: str, dtype: str = "float32", shape: tuple[Any, ...] = ("batch", 3), path: str | None = None
) -> dict[str, Any]:
    return {"name": name, "path": path or name, "dtype": dtype, "shape": list(shape)}


def manifest(inputs, outputs, parameters=(), constants=(), dims=None) -> dict[str, Any]:
    signature = {
        "parameters": list(parameters),
        "inputs": inputs,
        "constants": [{"path": path, "value": value} for path, value in dict(constants).items()],
        "outputs": outputs,
    }
    return {"format": 1, "signature": signature, "dims": dims or {}}


def write_model(folder: Path, nodes, inputs, outputs, initializers=()) -> None:
    def values(items):
        return [helper.make_tensor_value_info(i["name"], DTYPES[i["dtype"]][2], i["shape"]) for i in items]

    graph = helper.make_graph(list(nodes), "g", values(inputs), values(outputs), list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(folder / "model.onnx"))


def identity_bundle(folder: Path, dtype: str = "float32", shape: tuple[Any, ...] = ("batch", 3)) -> FakeBundle:
    inputs, outputs = [tensor("x", dtype, shape)], [tensor("y", dtype, shape)]
    write_model(folder, [helper.make_node("Identity", ["x"], ["y"])], inputs, outputs)
    return FakeBundle(folder, manifest(inputs, outputs))


def add_bundle(folder: Path) -> FakeBundle:
    inputs, outputs = [tensor("a"), tensor("b")], [tensor("y")]
    write_model(folder, [helper.make_node("Add", ["a", "b"], ["y"])], inputs, outputs)
    return FakeBundle(folder, manifest(inputs, outputs))


class Nested(torch.nn.Module):
    """Every kind of argument that a forward() has."""

    def forward(self, hidden, pair, *, extras, mask=None, unused=None, scale: float = 2.0):
        y = hidden * scale + pair[0] - pair[1] + extras["b"]
        if mask is not None:
            y = y * mask
        return {"last": y, "aux": (extras["a"], y.sum(-1))}


def nested_call() -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    t = [torch.randn(2, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    args, kwargs = (t[0], (t[1], t[2])), {"extras": {"b": t[3], "a": t[4]}, "mask": None, "unused": t[5], "scale": 0.5}
    y = t[0] * 0.5 + t[1] - t[2] + t[3]
    return args, kwargs, [y, t[4], y.sum(-1)]


def nested_manifest() -> dict[str, Any]:
    paths = ["hidden", "pair.0", "pair.1", "extras.b", "extras.a", "unused"]
    outputs = [tensor("last"), tensor("aux.0"), tensor("aux.1", shape=("batch",))]
    return manifest(
        [tensor(path) for path in paths],
        outputs,
        parameters=["hidden", "pair", "extras", "mask", "unused", "scale"],
        constants={"mask": None, "scale": 0.5},
    )


def nested_bundle(folder: Path, **parts: Any) -> FakeBundle:
    described = nested_manifest()
    signature = described["signature"]
    nodes = [
        helper.make_node("Mul", ["hidden", "half"], ["h"]),
        helper.make_node("Add", ["h", "pair.0"], ["hp"]),
        helper.make_node("Sub", ["hp", "pair.1"], ["hpp"]),
        helper.make_node("Add", ["hpp", "extras.b"], ["last"]),
        helper.make_node("Identity", ["extras.a"], ["aux.0"]),
        helper.make_node("ReduceSum", ["last", "axes"], ["aux.1"], keepdims=0),
    ]
    constants = [numpy_helper.from_array(np.float32(0.5), "half"), numpy_helper.from_array(np.array([-1]), "axes")]
    write_model(folder, nodes, signature["inputs"], signature["outputs"], constants)
    return FakeBundle(folder, described, **parts)


def exported_nested() -> Any:
    args, kwargs, _ = nested_call()
    dynamic = {0: torch.export.Dim.DYNAMIC}
    shapes = {"hidden": dynamic, "pair": (dynamic, dynamic), "extras": {"b": dynamic, "a": dynamic}, "mask": None,
                  "unused": dynamic, "scale": None}  # fmt: skip
    return torch.export.export(Nested(), args, kwargs, dynamic_shapes=shapes, strict=False)


# --- binding ---------------------------------------------------------------------------------------------------------


def test_a_value_that_is_two_outputs_is_returned_once(tmp_path):
    inputs, outputs = [tensor("x")], [tensor("y"), tensor("z"), tensor("y")]
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["z"])]
    write_model(tmp_path, nodes, inputs, outputs)
    session = open_session(FakeBundle(tmp_path, manifest(inputs, outputs)), "onnxruntime")
    x = np.float32([[1, -2, 3]])
    got = session.run({"x": x})
    assert np.array_equal(got["y"], -x)
    assert np.array_equal(got["z"], abs(x))


def test_nested_arguments_are_bound_by_path_whatever_their_order():
    args, kwargs, _ = nested_call()
    feeds = bind_call(Signature.from_manifest(nested_manifest()), args, kwargs)
    assert list(feeds) == ["hidden", "pair.0", "pair.1", "extras.b", "extras.a", "unused"]
    assert feeds["extras.a"] is kwargs["extras"]["a"]
    assert feeds["pair.1"] is args[1][1]


def test_lists_and_reordered_dicts_bind_like_the_containers_of_the_export():
    args, kwargs, _ = nested_call()
    kwargs["extras"] = dict(reversed(kwargs["extras"].items()))
    feeds = bind_call(Signature.from_manifest(nested_manifest()), (args[0], list(args[1])), kwargs)
    assert feeds["extras.b"] is kwargs["extras"]["b"]
    assert feeds["pair.0"] is args[1][0]


def test_parameters_may_all_be_keywords():
    args, kwargs, _ = nested_call()
    feeds = bind_call(Signature.from_manifest(nested_manifest()), (), dict(hidden=args[0], pair=args[1], **kwargs))
    assert feeds["pair.0"] is args[1][0]


def test_absent_constants_take_the_value_of_the_export():
    args, kwargs, _ = nested_call()
    del kwargs["scale"], kwargs["mask"]
    assert len(bind_call(Signature.from_manifest(nested_manifest()), args, kwargs)) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": 2.0}, "scale was fixed at 0.5 when the model was exported; got 2.0: export again"),
        ({"mask": torch.ones(2, 3)}, "mask was fixed at None when the model was exported; got a tensor float32[2, 3]"),
        ({"unused": None}, "argument 'unused' was a tensor float32[batch, 3] at export; got None: pass a tensor"),
        ({"extras": {"a": torch.ones(2, 3)}}, "missing argument 'extras.b' (float32[batch, 3]): the model was"),
        ({"extras": {}}, "missing arguments 'extras.b' (float32[batch, 3]), 'extras.a' (float32[batch, 3])"),
        ({"colour": 1}, "unexpected argument 'colour': the model takes 'hidden', 'pair'"),
        ({"hidden": torch.ones(2, 3)}, "argument 'hidden' was given by position and by name: give it once"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(change, message):
    args, kwargs, _ = nested_call()
    with pytest.raises(InputError) as caught:
        bind_call(Signature.from_manifest(nested_manifest()), args, {**kwargs, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


ROW = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": [ROW]}, "'hidden' must be a tensor float32[batch, 3]; got a list of 1: pass the tensor itself"),
        ({"hidden": (ROW, ROW)}, "'hidden' must be a tensor float32[batch, 3]; got a tuple of 2: pass one tensor"),
        ({"hidden": [[1.0, 2.0]]}, "'hidden' must be a tensor float32[batch, 3]; got a list of 1: make a tensor of it"),
        ({"hidden": []}, "'hidden' must be a tensor float32[batch, 3]; got a list of 0"),
        ({"hidden": {"a": ROW}}, "'hidden' must be a tensor float32[batch, 3]; got a dict with 'a': pass the tensor"),
        ({"hidden": {"hidden": ROW}}, "got a dict with 'hidden': pass them by name, as session(**arguments)"),
        ({"hidden": {"pair.0": ROW}}, "got a dict with 'pair.0': session.run() takes inputs by name"),
        ({"pair": ROW}, "'pair' must be a tuple or list of 2 (0: float32[batch, 3], 1: float32[batch, 3]); got"),
        ({"pair": {"a": ROW}}, "a tuple or list of 2 (0: float32[batch, 3], 1: float32[batch, 3]); got a dict with"),
        ({"pair": "ab"}, "'pair' must be a tuple or list of 2 (0: float32[batch, 3], 1: float32[batch, 3]); got a str"),
        ({"pair": (ROW, [ROW])}, "'pair.1' must be a tensor float32[batch, 3]; got a list of 1: pass the"),
        ({"extras": [ROW, ROW]}, "'extras' must be a dict of 2 (b: float32[batch, 3], a: float32[batch, 3]); got a l"),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_refused_with_what_is_taken(change, message):
    args, kwargs, _ = nested_call()
    named = {"hidden": args[0], "pair": args[1], **kwargs, **change}
    with pytest.raises(InputError) as caught:
        bind_call(Signature.from_manifest(nested_manifest()), (), named)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("feeds", [[ROW], ROW, None])
def test_feeds_that_are_no_dict_are_refused(feeds):
    with pytest.raises(InputError, match=r"inputs must be a dict from names to arrays \('hidden', .*\); got a "):
        check_feeds(Signature.from_manifest(nested_manifest()), feeds)


def test_an_extra_dict_entry_is_refused_by_path():
    args, kwargs, _ = nested_call()
    kwargs["extras"]["c"] = torch.ones(1)
    with pytest.raises(InputError, match=r"unexpected argument 'extras\.c'"):
        bind_call(Signature.from_manifest(nested_manifest()), args, kwargs)


def test_too_many_positional_arguments_are_counted():
    with pytest.raises(InputError, match="7 positional arguments given, and the model takes 6"):
        bind_call(Signature.from_manifest(nested_manifest()), range(7), {})


@pytest.mark.parametrize(("fixed", "given"), [(True, 1), (1, True), (0, False), ("a", "b"), (1.0, float("nan"))])
def test_constants_of_another_type_or_value_are_not_the_same(fixed, given):
    signature = Signature.from_manifest(manifest([], [], ["flag"], {"flag": fixed}))
    with pytest.raises(InputError, match="flag was fixed at"):
        bind_call(signature, (given,), {})


@pytest.mark.parametrize(("fixed", "given"), [(float("nan"), float("nan")), (2, 2.0), ("torch.float16", torch.float16)])
def test_constants_that_json_cannot_tell_apart_are_the_same(fixed, given):
    assert bind_call(Signature.from_manifest(manifest([], [], ["flag"], {"flag": fixed})), (given,), {}) == {}


def test_a_parameter_left_out_at_export_may_be_given_as_none_only():
    signature = Signature.from_manifest(manifest([tensor("x")], [], ["x", "mask"]))
    x = torch.ones(2, 3)
    assert list(bind_call(signature, (x,), {"mask": None})) == ["x"]
    with pytest.raises(InputError, match="unexpected argument 'mask': it was not given"):
        bind_call(signature, (x, x), {})


def test_variadic_parameters_bind_by_index_and_key():
    bound = bind_parameters(["x", "*rest", "**more"], (1, 2, 3), {"a": 4})
    assert bound == {"x": 1, "rest.0": 2, "rest.1": 3, "more.a": 4}


def test_keyword_only_parameters_after_variadic_ones_take_no_position():
    assert bind_parameters(["x", "*rest", "flag"], (1, 2), {"flag": 3}) == {"x": 1, "rest.0": 2, "flag": 3}


def test_deep_nesting_keeps_every_level_in_the_path():
    assert flatten("cache", [{"k": (1, None)}, []]) == {"cache.0.k.0": 1, "cache.0.k.1": None}


def test_a_python_number_is_taken_for_a_tensor_of_rank_zero():
    signature = Signature.from_manifest(manifest([tensor("step", "int64", ())], [], ["step"]))
    step = bind_call(signature, (7,), {})["step"]
    assert step.dtype == torch.int64
    assert step.item() == 7


# --- arrays ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_arrays_survive_the_way_to_torch_and_back(dtype, shape):
    array = np.ones(shape).astype(DTYPES[dtype][1])
    back = to_numpy(to_torch(array))
    assert back.dtype == array.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back.astype(np.float64), array.astype(np.float64))


def test_read_only_numpy_memory_is_never_shared_with_torch():
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    to_torch(array).zero_()
    assert array.sum() == 3


def test_the_memory_of_a_strided_tensor_is_never_bound_as_it_is():
    x = torch.arange(6.0).reshape(2, 3).T
    assert buffer_of("x", x).address != x.data_ptr()
    assert buffer_of("x", x.contiguous()).shape == (3, 2)


def test_a_contiguous_array_is_bound_in_place():
    x = np.ones((2, 3), np.float32)
    assert buffer_of("x", x).address == x.ctypes.data
    t = torch.ones(2, 3)[1:]
    assert buffer_of("t", t).address == t.data_ptr()


def test_tensors_without_memory_are_refused_by_name():
    with pytest.raises(InputError, match=r"input 'x' is a torch\.strided tensor on meta"):
        buffer_of("x", torch.ones(2, device="meta"))
    with pytest.raises(InputError, match=r"input 'x' is a torch\.sparse_coo tensor"):
        buffer_of("x", torch.ones(2, 2).to_sparse())
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    with pytest.raises(InputError, match="input 'x' is a fake tensor"):
        buffer_of("x", fake)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    signature = Signature((), (TensorSpec("x", "x", "float32", ("batch", "seq")),), {}, (), {})
    with pytest.raises(InputError, match="input 'x' is a nested tensor"):
        check_feeds(signature, {"x": nested})


# --- feeds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "missing input 'a': the model takes 'a'"),
        ({"a": np.ones((2, 3), np.float32), "z": np.ones(1)}, "unexpected input 'z': the model takes 'a'"),
        ({"a": np.ones((2, 3))}, "input 'a' is float64, expected float32: convert it before the call"),
        ({"a": torch.ones(2, 3).half()}, "input 'a' is float16, expected float32"),
        ({"a": np.ones((2, 4), np.float32)}, "input 'a' is float32[2, 4], expected float32[batch, 3]: axis 1 was"),
        ({"a": np.ones(3, np.float32)}, "input 'a' is float32[3], expected float32[batch, 3]: rank 1, not 2"),
        ({"a": [[1.0, 2.0, 3.0]]}, "input 'a' is a list, expected a tensor or numpy array float32[batch, 3]"),
    ],
)  # fmt: skip
def test_a_wrong_feed_is_refused_before_any_memory_is_bound(tmp_path, feeds, message):
    bundle = identity_bundle(tmp_path)
    bundle.manifest["signature"]["inputs"] = [tensor("a")]
    bundle.manifest["signature"]["outputs"] = [tensor("y")]
    write_model(tmp_path, [helper.make_node("Identity", ["a"], ["y"])], [tensor("a")], [tensor("y")])
    with pytest.raises(InputError) as caught:
        open_session(bundle, "onnxruntime").run(feeds)
    assert message in str(caught.value)


def test_one_dim_name_has_one_size_in_a_call(tmp_path):
    session = open_session(add_bundle(tmp_path), "onnxruntime")
    with pytest.raises(InputError, match="dim 'batch' is 2 in input 'a' and 1 in 'b'"):
        session(torch.ones(2, 3), torch.ones(1, 3))


def test_a_dim_beyond_its_declared_maximum_is_refused_and_zero_rows_run_where_nothing_forbids_them(tmp_path):
    bundle = identity_bundle(tmp_path)
    bundle.manifest["dims"] = {"batch": {"example": 2, "min": 0, "max": 4}}
    session = open_session(bundle, "onnxruntime")
    assert session(torch.ones(0, 3))[0].shape == (0, 3)
    with pytest.raises(InputError, match="dim 'batch' of input 'x' is 5; it was exported for 0 to 4"):
        session(torch.ones(5, 3))


def test_a_minimum_of_the_users_own_is_kept(tmp_path):
    bundle = identity_bundle(tmp_path)
    bundle.manifest["dims"] = {"batch": {"example": 8, "min": 8, "max": None}}
    with pytest.raises(InputError, match="is 7; it was exported for 8 to any"):
        open_session(bundle, "onnxruntime")(torch.ones(7, 3))


# --- ONNX Runtime ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_every_dtype_and_empty_tensors_come_back_bit_for_bit(tmp_path, dtype, shape):
    session = open_session(identity_bundle(tmp_path, dtype, ("n", 3)[: len(shape)]), "onnxruntime")
    array = np.arange(max(int(np.prod(shape)), 1))[: int(np.prod(shape))].reshape(shape).astype(DTYPES[dtype][1])
    y = session.run({"x": array})["y"]
    assert isinstance(y, np.ndarray)
    assert y.dtype == array.dtype
    assert y.shape == shape
    assert y.tobytes() == array.tobytes()
    x = to_torch(array)
    (t,) = session(x)
    assert t.dtype == DTYPES[dtype][0]
    assert torch.equal(t, x)


def test_torch_feeds_give_torch_outputs_and_numpy_feeds_numpy(tmp_path):
    session = open_session(add_bundle(tmp_path), "onnxruntime")
    a = np.ones((2, 3), np.float32)
    assert isinstance(session.run({"a": a, "b": a})["y"], np.ndarray)
    assert isinstance(session.run({"a": torch.from_numpy(a), "b": a})["y"], torch.Tensor)


@pytest.mark.parametrize("make", [
    lambda: torch.arange(6.0).reshape(3, 2).T,
    lambda: torch.arange(3.0).expand(2, 3),
    lambda: torch.arange(12.0).reshape(2, 6)[:, ::2],
    lambda: torch.arange(6.0).reshape(2, 3).requires_grad_(),
    lambda: torch._neg_view(torch.arange(6.0).reshape(2, 3)),
    lambda: np.arange(6, dtype=np.float32).reshape(3, 2).T,
    lambda: np.arange(6, dtype=np.float32).reshape(2, 3)[::-1],
    lambda: np.arange(6, dtype=">f4").reshape(2, 3),
    lambda: np.frombuffer(b"\0" + np.arange(6, dtype=np.float32).tobytes(), np.uint8)[1:].view("f4").reshape(2, 3),
    lambda: np.broadcast_to(np.arange(3, dtype=np.float32), (2, 3)),
])  # fmt: skip
def test_memory_of_any_layout_is_read_as_the_values_it_holds(tmp_path, make):
    x = make()
    want = x.detach().clone().numpy() if isinstance(x, torch.Tensor) else np.array(x, dtype=np.float32)
    got = open_session(identity_bundle(tmp_path), "onnxruntime").run({"x": x})["y"]
    np.testing.assert_array_equal(np.asarray(got), want)


def test_outputs_outlive_the_session_and_the_next_run(tmp_path):
    session = open_session(identity_bundle(tmp_path), "onnxruntime")
    (first,) = session(torch.ones(2, 3))
    (second,) = session(torch.zeros(2, 3))
    del session
    gc.collect()
    assert first.sum() == 6
    assert second.sum() == 0


def test_a_passed_through_input_is_not_returned_as_the_callers_memory(tmp_path):
    inputs, outputs = [tensor("x")], [tensor("x"), tensor("y")]
    write_model(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], inputs, outputs)
    session = open_session(FakeBundle(tmp_path, manifest(inputs, outputs)), "onnxruntime")
    x = torch.ones(2, 3)
    same, _ = session(x)
    x.zero_()
    assert same.sum() == 6


def test_a_model_from_an_onnx_file_takes_inputs_by_position_or_name(tmp_path):
    session = open_session(add_bundle(tmp_path), "onnxruntime")
    a, b = torch.ones(2, 3), np.full((2, 3), 2.0, np.float32)
    for (y,) in (session(a, b), session(a, b=b), session(b=b, a=a)):
        assert torch.equal(y, torch.full((2, 3), 3.0))


def test_outputs_come_in_the_manifests_order_not_the_files(tmp_path):
    bundle = nested_bundle(tmp_path)
    bundle.manifest["signature"]["outputs"].reverse()
    session = open_session(bundle, "onnxruntime")
    args, kwargs, want = nested_call()
    for got, expected in zip(session(*args, **kwargs), reversed(want), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("optimization", ["all", "extended", "basic", "disabled"])
def test_every_optimization_level_gives_the_same_outputs(tmp_path, optimization):
    session = open_session(nested_bundle(tmp_path), "onnxruntime", optimization=optimization, threads=1)
    args, kwargs, want = nested_call()
    for got, expected in zip(session(*args, **kwargs), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_an_unknown_optimization_names_the_choices(tmp_path):
    with pytest.raises(InputError, match="optimization 'max' is not one of all, extended, basic, disabled"):
        open_session(identity_bundle(tmp_path), "onnxruntime", optimization="max")


def test_session_options_of_the_caller_are_used(tmp_path):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    open_session(identity_bundle(tmp_path), "onnxruntime", session_options=options)
    assert (tmp_path / "optimized.onnx").is_file()


def test_external_data_is_found_beside_the_model(tmp_path):
    inputs, outputs = [tensor("x")], [tensor("y")]
    weight = numpy_helper.from_array(np.arange(3, dtype=np.float32), "w")
    write_model(tmp_path, [helper.make_node("Mul", ["x", "w"], ["y"])], inputs, outputs, [weight])
    model = onnx.load(str(tmp_path / "model.onnx"))
    onnx.save(
        model, str(tmp_path / "model.onnx"), save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    assert (tmp_path / "model.onnx.data").is_file()
    (y,) = open_session(FakeBundle(tmp_path, manifest(inputs, outputs)), "onnxruntime")(torch.ones(1, 3))
    assert y.tolist() == [[0.0, 1.0, 2.0]]


def test_a_missing_model_file_is_named(tmp_path):
    bundle = identity_bundle(tmp_path)
    bundle.model_path.unlink()
    with pytest.raises(InputError, match=r"no model at .*model\.onnx"):
        open_session(bundle, "onnxruntime")


def test_a_damaged_model_gives_one_line_with_the_cause(tmp_path):
    bundle = identity_bundle(tmp_path)
    bundle.model_path.write_bytes(b"\xff" * 64)
    with pytest.raises(InputError) as caught:
        open_session(bundle, "onnxruntime")
    assert str(bundle.model_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_failure_during_the_run_keeps_the_cause_in_one_line(tmp_path):
    inputs, outputs = [tensor("x", shape=("batch", "n")), tensor("s", "int64", (2,))], [tensor("y", shape=("a", "b"))]
    write_model(tmp_path, [helper.make_node("Reshape", ["x", "s"], ["y"])], inputs, outputs)
    session = open_session(FakeBundle(tmp_path, manifest(inputs, outputs)), "onnxruntime")
    with pytest.raises(DeployError, match=r"cannot run the model: .*Reshape") as caught:
        session(torch.ones(2, 3), torch.tensor([4, 4]))
    assert "\n" not in str(caught.value)


def test_a_manifest_of_another_model_is_refused(tmp_path):
    bundle = identity_bundle(tmp_path)
    bundle.manifest["signature"]["outputs"] = [tensor("z")]
    with pytest.raises(InputError, match=r"manifest\.json differ in 'z'"):
        open_session(bundle, "onnxruntime")


def test_outputs_that_are_no_tensors_are_refused_when_opened(tmp_path):
    inputs = [tensor("x")]
    sequence = helper.make_tensor_sequence_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("SequenceConstruct", ["x"], ["y"])], "g",
                              [helper.make_tensor_value_info("x", 1, ["batch", 3])], [sequence])  # fmt: skip
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "model.onnx"
    )
    with pytest.raises(InputError, match=r"output 'y' of .* is seq"):
        open_session(FakeBundle(tmp_path, manifest(inputs, [tensor("y")])), "onnxruntime")


def test_a_provider_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    with pytest.raises(BackendUnavailable, match=r"no FancyExecutionProvider; it has .*CPUExecutionProvider"):
        open_session(identity_bundle(tmp_path), "onnxruntime", providers=["FancyExecutionProvider"])


def test_tensorrt_keeps_its_engines_and_the_callers_options_win(tmp_path):
    present = ["TensorrtExecutionProvider", "CPUExecutionProvider"]
    asked = [
        ("TensorrtExecutionProvider", {"trt_fp16_enable": "1", "trt_engine_cache_enable": "0"}),
        "CPUExecutionProvider",
    ]
    (name, options), cpu = resolve_providers(present, asked, {}, tmp_path / "cache")
    assert name == "TensorrtExecutionProvider"
    assert options["trt_engine_cache_path"] == str(tmp_path / "cache")
    assert options["trt_engine_cache_enable"] == "0"
    assert options["trt_fp16_enable"] == "1"
    assert cpu == ("CPUExecutionProvider", {})


def test_tensorrt_is_told_of_the_plugin_library_where_it_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("rmsnorm_deploy.runtime.ort_providers.native_library", lambda kind: Path(f"/lib/{kind}.so"))
    assert tensorrt_options(tmp_path)["trt_extra_plugin_lib_paths"] == "/lib/tensorrt-ort.so"
    monkeypatch.setattr("rmsnorm_deploy.runtime.ort_providers.native_library", lambda kind: None)
    assert "trt_extra_plugin_lib_paths" not in tensorrt_options(tmp_path)


def test_custom_ops_that_are_asked_for_and_not_built_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rmsnorm_deploy.runtime.onnxruntime_session.native_library", lambda kind: None)
    with pytest.raises(BackendUnavailable, match="custom ops are not built: run"):
        open_session(identity_bundle(tmp_path), "onnxruntime", custom_ops=True)
    session = open_session(identity_bundle(tmp_path), "onnxruntime", custom_ops="auto")
    assert session.custom_ops is None
    assert "not built" in session.custom_ops_reason


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "TensorrtExecutionProvider"])
def test_a_session_on_a_gpu_does_without_ops_that_run_on_the_cpu_alone(monkeypatch, provider):
    from rmsnorm_deploy.runtime.onnxruntime_session import _choose_library

    providers, built = [provider, "CPUExecutionProvider"], {"ort": Path("/lib/ops.so")}
    monkeypatch.setattr("rmsnorm_deploy.runtime.onnxruntime_session.native_library", built.get)
    library, reason = _choose_library("auto", False, providers)
    assert library is None
    assert "no CUDA kernels" in reason
    with pytest.raises(BackendUnavailable, match="build --cpu --cuda"):
        _choose_library(True, False, providers)
    assert _choose_library("auto", False, providers[1:])[0] == built["ort"]
    built["cuda"] = Path("/lib/cuda.so")
    assert _choose_library("auto", False, providers)[0] == built["ort"]


def test_a_library_that_does_not_load_costs_speed_and_not_the_session(tmp_path, monkeypatch):
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr("rmsnorm_deploy.runtime.onnxruntime_session.native_library", lambda kind: broken)
    session = open_session(identity_bundle(tmp_path), "onnxruntime")
    assert session.custom_ops is None
    assert "libbroken.so does not serve this model" in session.custom_ops_reason
    assert session(torch.ones(2, 3))[0].sum() == 6
    with pytest.raises(BackendUnavailable, match=r"libbroken\.so does not serve"):
        open_session(identity_bundle(tmp_path), "onnxruntime", custom_ops=True)


@pytest.mark.skipif(native.find_library("ort") is None, reason="python -m rmsnorm_deploy.native build was not run")
def test_options_of_the_caller_serve_many_sessions_with_custom_ops(tmp_path):
    import onnxruntime as ort

    options = ort.SessionOptions()
    for _ in range(2):
        session = open_session(identity_bundle(tmp_path), "onnxruntime", session_options=options, custom_ops=True)
        assert session.custom_ops is not None
        assert session(torch.ones(2, 3))[0].sum() == 6
    untouched = open_session(identity_bundle(tmp_path), "onnxruntime", session_options=ort.SessionOptions())
    assert "rmsnorm_deploy.register" in untouched.custom_ops_reason


def test_threads_share_a_session(tmp_path):
    session = open_session(add_bundle(tmp_path), "onnxruntime", threads=1)
    wrong: list[int] = []

    def work(value: int) -> None:
        for _ in range(50):
            x = torch.full((2, 3), float(value))
            if not torch.equal(session(x, x)[0], 2 * x):
                wrong.append(value)

    workers = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


# --- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["eager", "program"])
def test_pytorch_runs_the_module_or_the_program_to_the_same_outputs(tmp_path, source):
    parts = {"eager": Nested()} if source == "eager" else {"traced": exported_nested()}
    session = open_session(nested_bundle(tmp_path, **parts), "pytorch")
    args, kwargs, want = nested_call()
    for got, expected in zip(session(*args, **kwargs), want, strict=True):
        torch.testing.assert_close(got, expected)
    del kwargs["scale"]  # forward()'s default is 2.0, and the export fixed 0.5
    for got, expected in zip(session(*args, **kwargs), want, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(InputError, match=r"scale was fixed at 0\.5"):
        session(*args, scale=2.0, **kwargs)


@pytest.mark.parametrize("source", ["eager", "program", "both"])
def test_pytorch_feeds_by_name_are_nested_as_at_export(tmp_path, source):
    parts: dict[str, Any] = {}
    if source != "program":
        parts["eager"] = Nested()
    if source != "eager":
        parts["traced"] = exported_nested()
    session = open_session(nested_bundle(tmp_path, **parts), "pytorch")
    args, kwargs, want = nested_call()
    feeds = bind_call(session.signature, args, kwargs)
    outputs = session.run({name: value.numpy() for name, value in feeds.items()})
    assert list(outputs) == ["last", "aux.0", "aux.1"]
    for got, expected in zip(outputs.values(), want, strict=True):
        assert isinstance(got, np.ndarray)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6)


def test_the_traced_program_takes_batches_that_the_example_did_not_have(tmp_path):
    session = open_session(nested_bundle(tmp_path, traced=exported_nested()), "pytorch")
    for batch in (0, 1, 5):
        t = torch.ones(batch, 3)
        outputs = session(t, (t, t), extras={"a": t, "b": t}, unused=t)
        assert outputs[0].shape == (batch, 3)


def test_arguments_are_rebuilt_in_the_programs_own_structure():
    signature = Signature.from_manifest(nested_manifest())
    leaves = {
        **signature.constants,
        **{path: index for index, path in enumerate(["hidden", "pair.0", "pair.1", "extras.b"])},
    }
    rebuilt = arguments_like(exported_nested(), signature.parameters, leaves)
    assert rebuilt == ((0, (1, 2)), {"extras": {"b": 3, "a": None}, "mask": None, "unused": None, "scale": 0.5})


def test_paths_nest_to_tuples_and_dicts():
    assert nest({"x": 1, "pair.0": 2, "pair.1": 3, "e.b": 4, "e.d.0": 5}) == {
        "x": 1,
        "pair": (2, 3),
        "e": {"b": 4, "d": (5,)},
    }


class Dropping(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5, self.training)


def test_a_module_in_training_mode_is_evaluated_and_left_in_training_mode(tmp_path):
    module = torch.nn.Sequential(Dropping(), torch.nn.Identity().eval())
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [tensor("y")], ["input"]), eager=module)
    (y,) = open_session(bundle, "pytorch")(torch.ones(4, 3))
    assert y.sum() == 12
    assert [part.training for part in module.modules()] == [True, True, False]


def test_pytorch_outputs_carry_no_graph(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [tensor("y")], ["input"]), eager=torch.nn.Linear(3, 3))
    (y,) = open_session(bundle, "pytorch")(torch.ones(4, 3))
    assert not y.requires_grad


def test_a_bundle_of_an_onnx_file_has_no_pytorch_backend(tmp_path):
    with pytest.raises(BackendUnavailable, match="made from an ONNX file and has no PyTorch model"):
        open_session(identity_bundle(tmp_path), "pytorch")


def test_a_module_that_returns_other_outputs_than_the_manifest_is_refused(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [], ["input"]), eager=torch.nn.Identity())
    with pytest.raises(InputError, match="returned 1 tensors, and the manifest has 0 outputs"):
        open_session(bundle, "pytorch")(torch.ones(2, 3))


def test_a_failing_module_keeps_its_cause_in_one_line(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [tensor("y")], ["input"]), eager=torch.nn.Linear(4, 4))
    with pytest.raises(InputError, match="pytorch cannot run the model: mat1 and mat2") as caught:
        open_session(bundle, "pytorch")(torch.ones(2, 3))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_cuda_device_that_is_not_there_is_refused(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [tensor("y")], ["input"]), eager=torch.nn.Identity())
    with pytest.raises(BackendUnavailable, match="device cuda was asked for"):
        open_session(bundle, "pytorch", device="cuda")


def test_an_unknown_device_is_refused(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("input")], [tensor("y")], ["input"]), eager=torch.nn.Identity())
    with pytest.raises(InputError, match="device 'gpu' is not one that torch knows"):
        open_session(bundle, "pytorch", device="gpu")


# --- opening ---------------------------------------------------------------------------------------------------------


def test_an_unknown_backend_or_option_names_the_choices(tmp_path):
    bundle = identity_bundle(tmp_path)
    with pytest.raises(
        InputError, match="no backend 'onnx': choose one of onnxruntime, pytorch, tensorrt, tensorrt-rtx"
    ):
        open_session(bundle, "onnx")
    with pytest.raises(InputError, match="backend onnxruntime has no option 'thread': its options are providers"):
        open_session(bundle, "onnxruntime", thread=1)
    with pytest.raises(InputError, match="backend tensorrt has no option 'fast': its options are engine, cuda_graph"):
        open_session(bundle, "tensorrt", fast=True)


def test_a_manifest_without_a_signature_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"manifest\.json has no 'signature'"):
        open_session(FakeBundle(tmp_path, {}), "onnxruntime")


def test_a_dtype_that_cannot_be_bound_is_refused_when_opened(tmp_path):
    bundle = FakeBundle(tmp_path, manifest([tensor("x", "complex64")], []))
    with pytest.raises(InputError, match="input 'x' is complex64, which the runtime does not bind"):
        open_session(bundle, "onnxruntime")


def test_importing_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, rmsnorm_deploy; print([m for m in ('torch','onnx','onnxruntime','numpy') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "[]"


def test_the_package_says_which_names_it_has():
    import rmsnorm_deploy

    assert set(rmsnorm_deploy.__all__) <= set(dir(rmsnorm_deploy))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        rmsnorm_deploy.nonsense  # noqa: B018
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{rmsnorm_deploy.__version__}"' in project


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_tensors_stay_on_the_gpu_with_the_cuda_provider(tmp_path):
    session = open_session(add_bundle(tmp_path), "onnxruntime", providers=["CUDAExecutionProvider"])
    x = torch.ones(2, 3, device="cuda")
    (y,) = session(x, x)
    assert y.device.type == "cuda"
    assert torch.equal(y, 2 * x)


def test_bfloat16_in_numpy_is_ml_dtypes(tmp_path):
    session = open_session(identity_bundle(tmp_path, "bfloat16"), "onnxruntime")
    assert session.run({"x": np.ones((2, 3), ml_dtypes.bfloat16)})["y"].dtype == ml_dtypes.bfloat16
