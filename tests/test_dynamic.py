"""Axes stay free without being named: masks, time steps, images; and what the model fixes is said."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rmsnorm_deploy import export_model
from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.errors import InputError

WIDTH, EPSILON = 16, 1e-5
OTHER_SIZES = [(3, 7), (1, 4)]
Array = np.ndarray[Any, Any]


def exact(x: torch.Tensor, weight: torch.Tensor) -> Array:
    v = x.double().numpy()
    return np.asarray(v / np.sqrt((v * v).mean(-1, keepdims=True) + EPSILON) * weight.detach().double().numpy())


class Normed(nn.Module):
    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.function = forward
        self.eval()


class Alone(Normed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.norm, x)


class Guided(Normed):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return self.function(self.norm, x, by)


def shapes(bundle: Bundle) -> list[list[Any]]:
    return [value["shape"] for value in bundle.manifest["signature"]["inputs"]]


def mixed(norm: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Every position weighted by an attention mask of [batch, 1, seq, seq] or [seq, seq]."""
    weights = mask.to(x.dtype)
    return torch.matmul(weights[:, 0] if weights.ndim == 4 else weights, norm(x))


def mixed_exact(y: Array, mask: Array) -> Array:
    return np.asarray(np.matmul(mask[:, 0] if mask.ndim == 4 else mask, y))


CASES: dict[str, tuple[Callable[[int, int], torch.Tensor], Callable[..., Any], Callable[[Array, Array], Array]]] = {
    "float mask": (lambda b, s: torch.rand(b, s), lambda n, x, m: n(x) * m[..., None], lambda y, m: y * m[..., None]),
    "bool mask": (
        lambda b, s: torch.rand(b, s) > 0.5,
        lambda n, x, m: n(x) * m[..., None],
        lambda y, m: y * m[..., None],
    ),
    "float attention mask": (lambda b, s: torch.rand(b, 1, s, s), mixed, mixed_exact),
    "bool attention mask": (lambda b, s: torch.rand(b, 1, s, s) > 0.5, mixed, mixed_exact),
    "causal mask": (lambda b, s: torch.rand(s, s) > 0.5, mixed, mixed_exact),
    "time step": (
        lambda b, s: torch.rand(b),
        lambda n, x, t: n(x) * t[:, None, None],
        lambda y, t: y * t[:, None, None],
    ),
}


@pytest.mark.parametrize("example", [(2, 5), (1, 5)])
@pytest.mark.parametrize("case", CASES)
def test_a_second_input_fixes_the_batch_or_the_sequence(case: str, example: tuple[int, int], tmp_path: Path) -> None:
    make, function, truth = CASES[case]
    torch.manual_seed(0)
    model = Guided(function)
    bundle = export_model(model, (torch.randn(*example, WIDTH), make(*example)), out_dir=tmp_path / "b")
    assert shapes(bundle)[0] == ["batch", "seq", WIDTH]
    assert not bundle.manifest["notes"]
    for sizes in OTHER_SIZES:
        x, by = torch.randn(*sizes, WIDTH), make(*sizes)
        (got,) = bundle.session("onnxruntime")(x, by)
        wanted = truth(exact(x, model.norm.weight), by.double().numpy())
        np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-5, atol=5e-6)


class Recurrent(nn.Module):
    """Written out a step at a time, so that the example's steps are all there are."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor, more: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        return torch.as_tensor(self.rnn(x)[0] + self.rnn(more["a"][0])[0].sum(1, keepdim=True))


def test_the_axis_that_a_model_fixed_is_not_named(tmp_path: Path) -> None:
    call = (torch.randn(2, 5, 6), {"a": [torch.randn(2, 4, 6)]})
    one = {"x": {0: "batch", 1: "steps"}, "more": {"a": [{0: "batch"}]}}
    says = r"axis 1 of 'x' is fixed at 5: the model needs the example's size, so give a number there"
    with pytest.raises(InputError, match=says):
        export_model(Recurrent(), call, out_dir=tmp_path / "b", dynamic_shapes=one)
    two = {**one, "more": {"a": [{0: "batch", 1: "others"}]}}
    says = r"axis 1 of 'x' is fixed at 5, axis 1 of 'more.a.0' is fixed at 4: the model needs the example's sizes, so"
    with pytest.raises(InputError, match=says):
        export_model(Recurrent(), call, out_dir=tmp_path / "b", dynamic_shapes=two)


def test_a_mask_from_a_recipe_fixes_the_sequence(tmp_path: Path) -> None:
    recipe = tmp_path / "masked_for_test.py"
    recipe.write_text(
        "import torch\nfrom torch import nn\nclass Masked(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.norm = nn.RMSNorm(16, eps=1e-5)\n"
        "    def forward(self, x, mask): return self.norm(x) * mask.unsqueeze(-1)\n"
        "def build(): return Masked()\n"
        "def inputs(): return torch.randn(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)\n"
    )
    bundle = export_model(recipe, out_dir=tmp_path / "b")
    assert shapes(bundle)[0] == ["batch", "seq", WIDTH]
    for batch, length in OTHER_SIZES:
        x, mask = torch.randn(batch, length, WIDTH), torch.rand(batch, length) > 0.5
        (got,) = bundle.session("onnxruntime")(x, mask)
        wanted = exact(x, torch.ones(WIDTH)) * mask.numpy()[..., None]
        np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("sizes", [(2, 3, 4), (3, 2, 5), (4, 3, 2), (5, 6, 7)])
@pytest.mark.parametrize("ones", [(0,), (1,), (2,), (1, 2)])
def test_an_axis_that_is_broadcast_is_tied_to_one_of_its_grown_size(
    sizes: tuple[int, int, int], ones: tuple[int, ...], tmp_path: Path
) -> None:
    """It must not be of size one while it is traced, and a mask for three channels was grown to three of them."""

    class Masked(Normed):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.norm(x) * mask

    model, x = Masked(torch.mul), torch.randn(*sizes, WIDTH)
    mask = torch.rand([1 if axis in ones else size for axis, size in enumerate(sizes)] + [1])
    bundle = export_model(model, (x, mask), out_dir=tmp_path / "b")
    got = np.asarray(bundle.session("onnxruntime")(x, mask)[0])
    np.testing.assert_allclose(got, exact(x, model.norm.weight) * mask.double().numpy(), rtol=1e-5)


def test_the_width_is_taken_for_a_length_where_sizes_coincide(tmp_path: Path) -> None:
    """Without a weight nothing fixes the width, and its root would not be a constant."""
    model = Guided(lambda _, x, y: nn.functional.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * y)
    call = (torch.randn(2, WIDTH, WIDTH), torch.randn(2, WIDTH, WIDTH))
    bundle = export_model(model, call, out_dir=tmp_path / "b")
    assert shapes(bundle) == [["batch", "seq", WIDTH]] * 2
    assert len(bundle.norms) == 1


class Pixels(nn.Module):
    def __init__(self, channels: int, rank: int) -> None:
        super().__init__()
        self.conv = {3: nn.Conv1d, 4: nn.Conv2d}[rank](channels, WIDTH, 4, 4)
        self.norm = nn.RMSNorm(WIDTH, eps=EPSILON)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] if x.ndim < self.conv.weight.ndim else x
        return self.norm(self.conv(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    ("channels", "rank", "example", "others"),
    [
        (3, 4, (2, 3, 16, 16), [(1, 3, 32, 24), (3, 3, 8, 12)]),
        (2, 3, (2, 2, 16), [(1, 2, 32), (3, 2, 12)]),
        (1, 3, (2, 16), [(1, 32), (3, 12)]),
    ],
)
def test_the_last_axis_of_an_image_is_fixed(
    channels: int, rank: int, example: tuple[int, ...], others: list[tuple[int, ...]], tmp_path: Path
) -> None:
    model = Pixels(channels, rank).eval()
    bundle = export_model(model, (torch.randn(example),), out_dir=tmp_path / "b")
    assert not bundle.manifest["notes"]
    model.double()
    for other in others:
        x = torch.randn(other)
        with torch.no_grad():
            wanted = model(x.double())
        np.testing.assert_allclose(bundle.session("onnxruntime")(x)[0].numpy(), wanted.numpy(), rtol=2e-5, atol=5e-6)


def test_an_axis_that_the_model_fixes_goes_unsaid(tmp_path: Path) -> None:
    class Placed(Alone):
        def __init__(self) -> None:
            super().__init__(lambda norm, x: norm(x))
            self.places = nn.Parameter(torch.randn(5, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x + self.places)

    bundle = export_model(Placed(), (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    assert shapes(bundle) == [["batch", 5, WIDTH]]
    assert bundle.manifest["notes"] == ["axis 1 of 'x' is fixed at 5: the model needs the example's size"]


def test_a_size_past_which_the_code_goes_another_way_is_told(tmp_path: Path) -> None:
    model = Alone(lambda norm, x: norm(x) * 2 if x.shape[1] > 8 else norm(x))
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b")
    assert len([note for note in bundle.manifest["notes"] if note.startswith("dim 'seq' is 8 at most")]) == 1
    with pytest.raises(InputError, match="exported for 0 to 8"):
        bundle.session("onnxruntime")(torch.randn(2, 9, WIDTH))


@functools.lru_cache
def _remembered(length: int) -> torch.Tensor:
    return torch.full((length, 1), 2.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda norm, x: norm(x) * {5: 2.0}[x.shape[1]],
        lambda norm, x: norm(x) * _remembered(x.shape[1]),
        lambda norm, x: norm(x) * norm.known.setdefault(x.shape[1], torch.full((x.shape[1], 1), 2.0)),
    ],
    ids=["a table", "a function's cache", "a module's cache"],
)
def test_a_size_that_python_needs_as_a_number_stops_the_export(function: Any, tmp_path: Path) -> None:
    model = Alone(function)
    model.norm.known = {}
    x = torch.randn(2, 5, WIDTH)
    bundle = export_model(model, (x,), out_dir=tmp_path / "b")
    assert shapes(bundle) == [[2, 5, WIDTH]]
    assert bundle.manifest["notes"] == ["no dimension could be made dynamic: all shapes are the example's"]
    assert not model.norm.known
    (got,) = bundle.session("onnxruntime")(x)
    np.testing.assert_allclose(got.numpy(), 2 * exact(x, model.norm.weight), rtol=2e-5, atol=5e-6)


def test_tracing_leaves_the_model_that_judges_it_as_it_was(tmp_path: Path) -> None:
    class Caching(Alone):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.longest = max(self.longest, x.shape[1])
            return self.norm(x)

    model = Caching(lambda norm, x: norm(x))
    model.longest = 0
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b", precision="fp32")
    assert model.longest == bundle.eager.longest == 0


@pytest.mark.parametrize("axes", [{-2: "words"}, {0: "rows", -2: "words"}, {1: "words"}])
def test_an_axis_counted_from_the_end_is_ignored(axes: dict[int, str], tmp_path: Path) -> None:
    model = Alone(lambda norm, x: norm(x))
    bundle = export_model(model, (torch.randn(2, 5, WIDTH),), out_dir=tmp_path / "b", dynamic_shapes={"x": axes})
    assert shapes(bundle) == [[axes.get(0, 2), "words", WIDTH]]
    for length in (3, 9):
        x = torch.randn(2, length, WIDTH)
        (got,) = bundle.session("onnxruntime")(x)
        np.testing.assert_allclose(got.numpy(), exact(x, model.norm.weight), rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("axes", "says"),
    [({3: "words"}, "axis 3 of 'x', which has axes 0 to 2"), ({-2: "a", 1: "b"}, "axis 1 of 'x' is given twice")],
)
def test_an_axis_that_is_not_there_or_named_twice_is_refused(axes: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        export_model(
            Alone(lambda norm, x: norm(x)), (torch.randn(2, 5, 4),), out_dir=tmp_path / "b", dynamic_shapes={"x": axes}
        )


def test_a_mask_fixes_the_sequence_of_torchscript(tmp_path: Path) -> None:
    model = Guided(lambda norm, x, m: norm(x) * m[..., None].to(x.dtype))
    traced = torch.jit.trace(model, (torch.randn(2, 5, WIDTH), torch.rand(2, 5)))
    bundle = export_model(traced, (torch.randn(2, 5, WIDTH), torch.rand(2, 5)), out_dir=tmp_path / "b")
    assert shapes(bundle) == [["batch", "seq", WIDTH], ["batch", "seq"]]
    for sizes in OTHER_SIZES:
        x, mask = torch.randn(*sizes, WIDTH), torch.rand(sizes)
        (got,) = bundle.session("onnxruntime")(x, mask)
        wanted = exact(x, model.norm.weight) * mask.double().numpy()[..., None]
        np.testing.assert_allclose(got.numpy(), wanted, rtol=2e-5, atol=5e-6)


class Rest(nn.Module):
    """Takes its second tensor among ``**others``."""

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x + others["bias"], (8,), eps=1e-5)


@pytest.mark.parametrize("nested", [None, True, False])
def test_tensors_among_the_rest_of_the_keywords_have_dynamic_axes(nested: bool | None, tmp_path: Path) -> None:
    axes = {0: "rows"}
    shapes = None if nested is None else {"x": axes, **({"others": {"bias": axes}} if nested else {"bias": axes})}
    x = torch.randn(3, 8)
    bundle = export_model(Rest().eval(), (x,), {"bias": x}, out_dir=tmp_path / "b", dynamic_shapes=shapes)
    x, bias = torch.randn(5, 8), torch.randn(5, 8)
    wide = (x + bias).double().numpy()
    y = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    for backend in ("onnxruntime", "pytorch"):
        np.testing.assert_allclose(bundle.session(backend)(x, bias=bias)[0].numpy(), y, rtol=1e-5, atol=1e-6)
