"""The --input and --dim grammar, example tensors, dynamic shapes, and inputs inferred from the first layer."""

from __future__ import annotations

import inspect
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.export.trace import trace
from rmsnorm_deploy.load import Source, load_source, prepare_module
from rmsnorm_deploy.load.infer import infer_inputs
from rmsnorm_deploy.load.inputs import Call, check_dims, dynamic_shapes, example_sizes, make_call, tensors_of
from rmsnorm_deploy.load.specs import ConstantSpec, TensorSpec, parse_dims, parse_input, parse_inputs
from rmsnorm_deploy.usercode import import_file


class Norm(nn.Module):
    """A hand-written norm, which nothing but its one parameter describes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden / hidden.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * self.gain


class Sequence(nn.Module):
    """Works on [batch, seq, width] only."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        b, s, d = x.shape
        return self.fc(x.reshape(b * s, d)).reshape(b, s, d) * scale


class Attention(Sequence):
    """Runs on [batch, width] as well, but is named for sequences."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.fc(x) * scale


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("x=float32[batch,seq,64]", TensorSpec("x", torch.float32, ("batch", "seq", 64))),
        (" x = bfloat16 [ b , 3 ] ", TensorSpec("x", torch.bfloat16, ("b", 3))),
        ("ids=int64[batch,seq]:32000", TensorSpec("ids", torch.int64, ("batch", "seq"), 32000)),
        ("t=float32[]", TensorSpec("t", torch.float32, ())),
        ("pair.0=float16[2]", TensorSpec("pair.0", torch.float16, (2,))),
        ("scale=0.5", ConstantSpec("scale", 0.5)),
        ("mask=None", ConstantSpec("mask", None)),
        ("causal=True", ConstantSpec("causal", True)),
    ],
)
def test_a_spec_reads_as_it_is_written(text: str, spec: Any) -> None:
    assert parse_input(text) == spec


@pytest.mark.parametrize("text", ["x=float32[batch,seq,64]", "ids=int64[batch,seq]:32000"])
def test_a_spec_prints_as_it_is_read(text: str) -> None:
    assert str(parse_input(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x", "NAME=DTYPE"),
        ("=float32[2]", "NAME=DTYPE"),
        ("x=float33[2]", "float33 is not a torch dtype"),
        ("x=nn[2]", "nn is not a torch dtype"),
        ("x=float32[2,,3]", "neither a size nor a name"),
        ("x=float32[-1]", "neither a size nor a name"),
        ("x=float32[2", "neither DTYPE"),
        ("x=float32[2]:7", "bounds integers"),
        ("x=int64[2]:0", "above 0"),
        ("x=int64[2]:many", "above 0"),
        ("x=[1,2]", "a number, a string"),
        ("x=__import__('os')", "neither DTYPE"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_part_that_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("[", r"\[")):
        parse_input(text)


@pytest.mark.parametrize("texts", [["x=float32[2]", "x=float32[3]"], ["p=1", "p.0=2"], ["p.a.b=1", "p.a=2"]])
def test_one_input_given_twice_is_refused(texts: list[str]) -> None:
    with pytest.raises(InputError, match="given twice"):
        parse_inputs(texts)


@pytest.mark.parametrize(
    ("text", "found"),
    [("batch=1:32", (1, 32)), ("seq=4:", (4, None)), ("batch=1..8", (1, 8)), (" s = 2 : 3 ", (2, 3))],
)
def test_a_range_reads_as_it_is_written(text: str, found: tuple[int, int | None]) -> None:
    assert list(parse_dims([text]).values()) == [found]


@pytest.mark.parametrize("texts", [["batch"], ["batch=4"], ["batch=4:4"], ["batch=8:2"], ["1=2:3"], ["a=1:2", "a=1:3"]])
def test_a_wrong_range_is_refused(texts: list[str]) -> None:
    with pytest.raises(InputError, match=r"--dim"):
        parse_dims(texts)


def test_example_sizes_are_above_one_and_never_alike() -> None:
    specs = [
        TensorSpec("x", torch.float32, ("batch", "seq", "a", "b", 3, 5)),
        TensorSpec("y", torch.float32, ("batch", 2)),
    ]
    sizes = example_sizes(specs, {})
    assert set(sizes) == {"batch", "seq", "a", "b"}
    assert len({*sizes.values(), 2, 3, 5}) == 7
    assert min(sizes.values()) > 1


def test_example_sizes_stay_inside_their_range() -> None:
    specs = [TensorSpec("x", torch.float32, ("batch", "seq", "tail"))]
    sizes = example_sizes(specs, {"batch": (6, 9), "seq": (100, None), "tail": (1, 2)})
    assert 6 <= sizes["batch"] <= 9
    assert sizes["seq"] >= 100
    assert sizes["tail"] == 2


def test_a_range_for_a_dim_nobody_has_is_refused() -> None:
    with pytest.raises(InputError, match="no input has a dim of that name; there is batch"):
        example_sizes([TensorSpec("x", torch.float32, ("batch", 4))], {"bacth": (1, 4)})


@pytest.mark.parametrize("size", [10**12, 10**18])
@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_an_example_that_no_memory_holds_ends_the_program(size: int, dtype: str) -> None:
    def forward(x: Any) -> None: ...

    with pytest.raises(InputError, match=rf"input x: no memory for an example of \[{size}, 16\]: give smaller sizes"):
        make_call(parse_inputs([f"x={dtype}[rows,16]"]), inspect.signature(forward), parse_dims([f"rows={size}:"]))


def test_examples_are_repeatable_and_keep_bounds_and_dtypes() -> None:
    def forward(x: Any, ids: Any, flag: Any) -> None: ...

    specs = parse_inputs(["x=bfloat16[batch,4]", "ids=int64[batch,seq]:3", "flag=bool[batch]"])
    first, again = (make_call(specs, inspect.signature(forward), {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.args, again.args, strict=True))
    assert [a.dtype for a in first.args] == [torch.bfloat16, torch.int64, torch.bool]
    assert first.args[1].max() < 3
    assert first.dims == {"x": {0: "batch"}, "ids": {0: "batch", 1: "seq"}, "flag": {0: "batch"}}
    assert first.high == {"ids": 3}


def test_nested_inputs_and_keywords_are_put_where_forward_wants_them() -> None:
    def forward(hidden: Any, pair: Any, *, extras: Any, mask: Any = None, scale: float = 2.0) -> None: ...

    texts = ["pair.1=float32[b,2]", "extras.b=float32[b]", "hidden=float32[b,4]", "pair.0=float32[b,3]", "scale=0.5"]
    call = make_call(parse_inputs(texts), inspect.signature(forward), {"b": (1, 9)})
    assert [tuple(t.shape[1:]) for t in (call.args[0], *call.args[1])] == [(4,), (3,), (2,)]
    assert call.kwargs["scale"] == 0.5
    assert set(call.kwargs) == {"extras", "scale"}
    assert set(tensors_of(inspect.signature(forward), call.args, call.kwargs)) == {
        "hidden",
        "pair.0",
        "pair.1",
        "extras.b",
    }
    shapes = dynamic_shapes(inspect.signature(forward), call, {"b": (1, 9)})
    assert shapes is not None
    assert shapes["pair"][0].keys() == {0}
    assert (shapes["hidden"][0].min, shapes["hidden"][0].max) == (1, 9)
    assert shapes["scale"] is None


def test_unknown_and_missing_names_are_refused_by_name() -> None:
    def forward(x: Any, mask: Any) -> None: ...

    with pytest.raises(InputError, match=r"--input y: forward has no parameter of that name; it takes x, mask"):
        make_call(parse_inputs(["y=float32[2]"]), inspect.signature(forward), {})
    with pytest.raises(InputError, match=r"needs mask as well: give --input 'mask="):
        make_call(parse_inputs(["x=float32[2]"]), inspect.signature(forward), {})


def test_dims_of_a_recipe_are_checked_against_its_inputs() -> None:
    tensors = {"x": torch.zeros(2, 3), "y": torch.zeros(4)}
    with pytest.raises(InputError, match="no tensor of the inputs"):
        check_dims(tensors, {"z": {0: "b"}}, "r.py")
    with pytest.raises(InputError, match="axis 2 of 'x'"):
        check_dims(tensors, {"x": {2: "b"}}, "r.py")
    with pytest.raises(InputError, match="'b' is 2 in one input and 4 in 'y'"):
        check_dims(tensors, {"x": {0: "b"}, "y": {0: "b"}}, "r.py")


def test_named_dims_stay_dynamic_in_torch_export() -> None:
    model = nn.Linear(4, 4)
    call = make_call(parse_inputs(["input=float32[batch,seq,4]"]), inspect.signature(model.forward), {})
    shapes = dynamic_shapes(inspect.signature(model.forward), call, {})
    program = torch.export.export(model, call.args, call.kwargs, dynamic_shapes=shapes)
    shape = next(n.meta["val"].shape for n in program.graph.nodes if n.name == "input")
    assert not isinstance(shape[0], int)
    assert not isinstance(shape[1], int)
    assert shape[2] == 4


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        (nn.Linear(8, 2), "input=float32[batch,8]"),
        (nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 2)), "input=float32[batch,8]"),
        (nn.RMSNorm((3, 8)), "x=float32[batch,3,8]"),
        (nn.LayerNorm(8).to(torch.bfloat16), "input=bfloat16[batch,8]"),
        (Norm(8), "hidden=float32[batch,8]"),
        (Sequence(), "x=float32[batch,seq,8]"),
        (Attention(), "x=float32[batch,seq,8]"),
        (nn.Sequential(nn.Embedding(50, 8), nn.RMSNorm(8)), "input=int64[batch,seq]:50"),
        (nn.TransformerEncoderLayer(16, 4, batch_first=True), "src=float32[batch,seq,16]"),
        (nn.LSTM(6, 4, batch_first=True), "input=float32[batch,seq,6]"),
        (nn.LSTM(6, 4), "input=float32[seq,batch,6]"),
        (nn.Conv1d(3, 4, 3), "input=float32[batch,3,length]"),
        (nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4)), "input=float32[batch,3,height,width]"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_the_first_layer_tells_the_input(model: nn.Module, chosen: str) -> None:
    call, note = infer_inputs(model.eval(), {})
    assert chosen in note
    model(*call.args)


def test_inference_leaves_buffers_and_random_state_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return torch.rand(1) + self.fc(x)

    model = Counting()
    state = torch.random.get_rng_state()
    infer_inputs(model, {})
    assert model.calls == 0
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_model_that_cannot_be_guessed_is_refused_with_the_option_to_give() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * mask

    class Bare(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x.reshape(-1, 2, 3, 7).movedim(1, 3)[..., 9:, :])

    with pytest.raises(InputError, match=r"--input 'x=DTYPE\[DIM,...\]' --input 'mask="):
        infer_inputs(Two(), {})
    with pytest.raises(InputError, match=r"no layer tells it: give --input 'x="):
        infer_inputs(Bare(), {})
    with pytest.raises(InputError, match=r"do not fit the model \(x=float32\[batch,7\]: .*give --input 'x="):
        infer_inputs(Odd(), {})


def test_inferred_dims_give_way_and_named_ones_do_not() -> None:
    call = Call((torch.zeros(2, 4),), {}, {"x": {0: "batch"}})

    def forward(x: Any) -> None: ...

    assert dynamic_shapes(inspect.signature(forward), call, {}, Dim.AUTO) == {"x": {0: Dim.AUTO}}
    assert dynamic_shapes(inspect.signature(forward), call, {}) == {"x": {0: Dim.DYNAMIC}}


def test_a_fixed_size_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="a fixed size of 0"):
        parse_input("x=float32[0,s,64]")


@pytest.mark.parametrize(
    "given",
    [
        ["x=float32[batch,8]"],
        ["x=int64[batch,16]"],
        ["x=float64[batch,16]"],
        ["x.0=float32[batch,16]"],
        ["x=3"],
        ["x=float32[batch,16]", "scale=float32[batch,7]"],
    ],
)
@pytest.mark.parametrize("scripted", [False, True])
def test_an_input_that_the_model_refuses_is_named_with_what_it_takes(
    given: list[str], scripted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "scaled_for_test.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom typing import Optional\nclass Scaled(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.norm = nn.RMSNorm(16)\n        self.fc = nn.Linear(16, 4)\n"
        "    def forward(self, x, scale: Optional[torch.Tensor] = None):\n        y = self.fc(self.norm(x))\n"
        "        return y if scale is None else y * scale\ndef build(): return Scaled()\n"
    )
    if scripted:
        torch.jit.script(import_file(path).build()).save(tmp_path / "scaled.pt")
        path = tmp_path / "scaled.pt"
    with pytest.raises(InputError) as caught:
        trace(load_source(path, inputs=given), 18)
    message = str(caught.value)
    assert "\n" not in message
    for text in given:
        assert f"--input {shlex.quote(text)}" in message
    assert "it takes forward(x, scale)" in message
    assert "float32[batch,16]" in message.split("suggests ")[1]


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ("None", "returns no tensor"),
        ("'text', 3", "returns no tensor"),
        ("torch.fft.fft(x)", "returns complex numbers"),
    ],
)
def test_what_onnx_cannot_return_is_refused_when_traced(returned: str, says: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return eval(returned)

    with pytest.raises(InputError, match=f"Odd {says}"):
        trace(Source("module", Odd(), (torch.randn(2, 16),)), 18)


def test_a_forward_without_inputs_is_refused() -> None:
    class Closed(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(1)

    with pytest.raises(InputError, match="takes no inputs"):
        infer_inputs(Closed(), {})


def test_weights_that_are_not_finite_are_noted() -> None:
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 2))
    assert prepare_module(model.eval())[1] == []
    with torch.no_grad():
        model[0].weight[3], model[1].bias[0] = float("nan"), float("inf")
    assert prepare_module(model)[1] == ["NaN or infinity in the weights 0.weight, 1.bias"]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
)
def test_weights_of_one_byte_are_looked_through(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.RMSNorm(4)).eval()
    model.register_parameter(
        "scales", nn.Parameter(torch.arange(4, dtype=torch.uint8).view(dtype), requires_grad=False)
    )
    assert prepare_module(model)[1] == []
    if dtype == torch.float8_e5m2:
        model.scales.data = torch.tensor([1.0, float("inf")]).to(dtype)
        assert prepare_module(model)[1] == ["NaN or infinity in the weights scales"]
