"""A model that draws random numbers is not called the same as anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional

from rmsnorm_deploy import export_model, open_bundle
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import run_parity

X = torch.randn(2, 5, 16)


class Norm(nn.Module):
    """A norm, and what ``after`` makes of it."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(16), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(x))


def attention(y: Tensor, dropout: float) -> Tensor:
    return functional.scaled_dot_product_attention(y[:, None], y[:, None], y[:, None], dropout_p=dropout)


DRAWING: dict[str, Callable[[Tensor], Tensor]] = {
    "Dropout": lambda y: functional.dropout(y, 0.5),
    "scaled_dot_product_attention": lambda y: attention(y, 0.1),
    "RandomNormalLike": lambda y: y + torch.randn(16),
    "RandomUniformLike": lambda y: functional.gumbel_softmax(y),
    "Bernoulli": lambda y: torch.bernoulli(y.sigmoid()),
    "Multinomial": lambda y: torch.multinomial(y[0].softmax(-1), 3),
}


@pytest.mark.parametrize("op", DRAWING)
def test_a_model_that_draws_is_refused_and_says_where(op: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"draws random numbers \({op} at test_chance\.py:\d+"):
        export_model(Norm(DRAWING[op]).eval(), (X,), out_dir=tmp_path / "b", check=True)
    assert not (tmp_path / "b").exists()


def test_a_branch_that_draws_is_seen(tmp_path: Path) -> None:
    def either(y: Tensor) -> Tensor:
        return torch.cond(y.sum() > 0, lambda a: attention(a, 0.1), lambda a: a[:, None] * 2, (y,))

    with pytest.raises(InputError, match="draws random numbers"):
        export_model(Norm(either).eval(), (X,), out_dir=tmp_path / "b", check=True)


@pytest.mark.parametrize("op", ["Dropout", "scaled_dot_product_attention"])
def test_it_is_exported_unchecked_with_a_note_and_never_judged(op: str, tmp_path: Path) -> None:
    bundle = export_model(Norm(DRAWING[op]).eval(), (X,), out_dir=tmp_path / "b")
    assert [note for note in bundle.manifest["notes"] if "draws random numbers" in note]
    with pytest.raises(InputError, match="draws random numbers"):
        run_parity(open_bundle(tmp_path / "b"))


STILL: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of nothing": lambda y: functional.dropout(y, 0.0),
    "dropout at inference": lambda y: functional.dropout(y, 0.5, training=False),
    "attention without dropout": lambda y: attention(y, 0.0),
    "numbers that nobody reads": lambda y: (torch.randn_like(y), y * 2)[1],
}


@pytest.mark.parametrize("name", STILL)
def test_what_is_the_same_each_time_is_judged(name: str, tmp_path: Path) -> None:
    bundle = export_model(Norm(STILL[name]).eval(), (X,), out_dir=tmp_path / "b", check=True)
    assert not [note for note in bundle.manifest["notes"] if "random" in note]


def test_scripted_dropout_is_seen_too(tmp_path: Path) -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(self.norm(x), 0.5)

    scripted = torch.jit.trace(Dropping().eval(), X, check_trace=False)
    with pytest.raises(InputError, match="draws random numbers"):
        export_model(scripted, (X,), out_dir=tmp_path / "b", check=True)


def onnx_model(*nodes: onnx.NodeProto, functions: tuple[onnx.FunctionProto, ...] = ()) -> onnx.ModelProto:
    """x -> the nodes -> y, after a norm n of x."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 8]) for name in "xy")
    norm = [
        helper.make_node("Mul", ["x", "x"], ["xx"]),
        helper.make_node("ReduceMean", ["xx"], ["mean"], axes=[-1]),
        helper.make_node("Sqrt", ["mean"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["n"]),
    ]
    given = [
        helper.make_tensor("half", TensorProto.FLOAT, [], [0.5]),
        *(helper.make_tensor(name, TensorProto.BOOL, [], [name == "yes"]) for name in ("yes", "no")),
    ]
    graph = helper.make_graph([*norm, *nodes], "g", [x], [y], given)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=9)


def in_a_branch() -> onnx.ModelProto:
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 8])
    drawn = helper.make_graph([helper.make_node("RandomNormalLike", ["n"], ["z"])], "then", [], [out])
    copied = helper.make_graph([helper.make_node("Identity", ["n"], ["z"])], "else", [], [out])
    return onnx_model(helper.make_node("If", ["yes"], ["y"], then_branch=drawn, else_branch=copied))


def in_a_function() -> onnx.ModelProto:
    body = [helper.make_node("RandomUniformLike", ["a"], ["b"])]
    function = helper.make_function("own", "Noise", ["a"], ["b"], body, [helper.make_opsetid("", 17)])
    return onnx_model(helper.make_node("Noise", ["n"], ["y"], domain="own"), functions=(function,))


def dropping(training: str) -> onnx.ModelProto:
    return onnx_model(helper.make_node("Dropout", ["n", "half", training], ["y"]))


@pytest.mark.parametrize(
    "make", [in_a_branch, in_a_function, lambda: dropping("yes")], ids=["If", "function", "Dropout"]
)
def test_an_onnx_file_that_draws_is_refused(make: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draws random numbers"):
        export_model(make(), out_dir=tmp_path / "b", check=True)


@pytest.mark.parametrize("training", ["", "no"])
def test_a_dropout_that_drops_nothing_is_no_draw(training: str, tmp_path: Path) -> None:
    bundle = export_model(dropping(training), out_dir=tmp_path / "b", check=True)
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    found = np.asarray(bundle.session("onnxruntime").run({"x": x})["y"])
    np.testing.assert_allclose(found, x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True)), rtol=1e-6)
