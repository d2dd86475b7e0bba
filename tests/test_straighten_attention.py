"""Attention of models, straightened: it gets shorter where it can, and is PyTorch's at any size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from attention_models import SHAPES, SIZE, WIDTH, Attention, export, plain, rotated, rows, same, sdpa, tables
from torch import Tensor, nn

EXAMPLE = rows(2, 5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def causal(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m.out(sdpa(q, m.repeated(k), m.repeated(v), is_causal=True))


def interleaved(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    each = m.heads // m.groups
    return m.out(sdpa(q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)))


def built_in(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m.out(sdpa(q, k, v, is_causal=True, enable_gqa=True))


def softcap(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = torch.tanh(q @ m.repeated(k).mT / 5) * 5
    hidden = torch.full((q.shape[2], q.shape[2]), -1e9, dtype=q.dtype).triu(1)[None, None]
    return m.out((scores + hidden).softmax(-1, dtype=torch.float32).to(q.dtype) @ m.repeated(v))


def column(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m.out((q @ m.repeated(k).mT * q.mean((1, 3), keepdim=True)).softmax(-1) @ m.repeated(v))


@pytest.mark.parametrize(
    ("attend", "groups"),
    [(causal, 1), (causal, 2), (built_in, 1), (built_in, 3), (interleaved, 2), (softcap, 2), (column, 3), (plain, 2)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_keys_of_groups_are_not_repeated(attend: Any, groups: int, tmp_path: Path) -> None:
    model = Attention(attend, groups=groups)
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["Repeat"] == 0
    assert ops["MatMul"] == 4  # one for queries, keys and values
    # PyTorch's own export of repeat_interleave can't do without a row
    shapes = SHAPES if attend is not interleaved else SHAPES[:4]
    same(bundle, model, [rows(*shape) for shape in shapes])


def built_in_masked(m: Attention, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Any:
    return m.out(sdpa(q, k, v, attn_mask=numbers, enable_gqa=True))


def test_groups_under_a_mask_are_repeated_where_pytorch_shares_them(tmp_path: Path) -> None:
    model = Attention(built_in_masked)
    for make in (weighing, mask):
        bundle, ops = export(model, (*EXAMPLE, make("b1qk", 2, 5)), tmp_path)
        assert (ops["Repeat"], ops["ReduceMax"], ops["IsNaN"]) == (0, 1, 0)
        same(bundle, model, [(*rows(*shape), make("b1qk", *shape)) for shape in SHAPES])


def tiled(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    each = m.heads // m.groups
    return m.out(sdpa(q, k.repeat(1, each, 1, 1), v.repeat(1, each, 1, 1)))


def outer(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    b, g, s, d = k.shape
    k, v = (x[:, None].expand(b, m.heads // g, g, s, d).reshape(b, m.heads, s, d) for x in (k, v))
    return m.out((q @ k.mT).softmax(-1) @ v)


def with_sinks(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = q @ m.repeated(k).mT
    sinks = m.norm.weight[: m.heads].view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return m.out(torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ m.repeated(v))


def by_head(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    slopes = m.norm.weight[: m.heads].view(1, -1, 1, 1) * torch.arange(k.shape[2])
    return m.out((q @ m.repeated(k).mT + slopes).softmax(-1) @ m.repeated(v))


def with_weights(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    weights = (q @ m.repeated(k).mT).softmax(-1)
    return m.out(weights @ m.repeated(v)), weights


def differential(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    first, second = ((x @ m.repeated(k).mT).softmax(-1) for x in (q, q.flip(1)))
    return m.out((first - 0.3 * second) @ m.repeated(v))


@pytest.mark.parametrize(
    "attend", [tiled, outer, with_sinks, by_head, with_weights, differential], ids=lambda f: f.__name__
)
def test_heads_that_are_told_apart_stay_apart(attend: Any, tmp_path: Path) -> None:
    model = Attention(attend)
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES[:4]])


def masked(m: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
    return sdpa(q, m.repeated(k), m.repeated(v), attn_mask=mask)


def mask(axes: str, batch: int, seq: int) -> Tensor:
    """A mask that hides all keys from some queries; ``axes`` of b(atch), h(eads), q(ueries), k(eys) and 1."""
    sizes = {"b": batch, "h": 6, "q": seq, "k": seq, "1": 1}
    seen = torch.rand([sizes[axis] for axis in axes]) > 0.4
    if seen.numel():
        seen.view(-1, seen.shape[-1])[0] = False
    return seen


@pytest.mark.parametrize(
    ("axes", "groups"), [("b1qk", 2), ("b1qk", 6), ("b11k", 1), ("bhqk", 2), ("qk", 2), ("hqk", 2), ("b1q1", 2)]
)
def test_a_query_that_sees_nothing_gets_exactly_zero(axes: str, groups: int, tmp_path: Path) -> None:
    model = Attention(masked, groups=groups)
    bundle, ops = export(model, (*EXAMPLE, mask(axes, 2, 5)), tmp_path)
    assert ops["IsNaN"] == 0
    calls = [(*rows(*shape), mask(axes, *shape)) for shape in SHAPES]
    same(bundle, model, calls)
    session = bundle.session("onnxruntime")
    for x, seen in calls[:4]:
        blind = ~seen.any(-1, keepdim=True).expand(x.shape[0], 6, x.shape[1], SIZE)
        assert blind.any()
        assert (session(x, seen)[0][blind] == 0).all()


def test_a_models_own_guard_means_what_it_says(tmp_path: Path) -> None:
    """A finite number hides no row from a Softmax: PyTorch gives the mean of the values, and nothing to guard."""

    def own(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
        p = (q @ m.repeated(k).mT + torch.where(seen, 0.0, torch.finfo(torch.float32).min)).softmax(-1)
        return m.out(torch.where(p.isnan(), 0.0, p) @ m.repeated(v))

    model = Attention(own)
    bundle, _ = export(model, (*EXAMPLE, mask("b1qk", 2, 5)), tmp_path)
    same(bundle, model, [(*rows(*shape), mask("b1qk", *shape)) for shape in SHAPES[:4]])


@pytest.mark.parametrize("left", [False, True])
def test_layers_ask_a_mask_of_padding_once(left: bool, tmp_path: Path) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(plain) for _ in range(2))

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            place = torch.arange(x.shape[1])
            seen = padding[:, None, None].bool() & (place[None] <= place[:, None])[None, None]
            for layer in self.layers:
                x = x + layer(x, seen)
            return x

    def call(batch: int, seq: int) -> tuple[Tensor, Tensor]:
        padding = torch.ones(batch, seq, dtype=torch.int64)
        padding[:1, slice(seq // 2) if left else slice(seq // 2, None)] = 0
        padding[1:2] = 0
        return (*rows(batch, seq), padding)

    model = Layers()
    bundle, ops = export(model, call(2, 6), tmp_path)
    assert (ops["IsNaN"], ops["ReduceMax"], ops["Repeat"]) == (0, 1, 0)
    same(bundle, model, [call(*shape) for shape in SHAPES])


def test_a_mask_made_of_a_length_has_no_constant_size(tmp_path: Path) -> None:
    """A Range up to an unknown length was taken for an empty one, and its mask for [0, 0]: no runtime ran that."""

    def window(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
        place = torch.arange(q.shape[2])
        seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 3)
        return m.out(sdpa(q, m.repeated(k), m.repeated(v), attn_mask=seen))

    model = Attention(window)
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_what_reads_rotated_keys_may_come_before_the_queries(tmp_path: Path) -> None:
    def keys_first(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
        table = tables(q.shape[2], q)
        keys = m.repeated(rotated(k, *table)).mT
        return m.out((rotated(q, *table) @ keys).softmax(-1) @ m.repeated(v))

    model = Attention(keys_first)
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def partial(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    table = tables(q.shape[2], q, 4)
    q, k = (torch.cat((rotated(x[..., :4], *table), x[..., 4:]), -1) for x in (q, k))
    return m.out(sdpa(q, m.repeated(k), m.repeated(v)))


def pairs(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    cos, sin = tables(q.shape[2], q)
    q, k = (x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin for x in (q, k))
    return m.out(sdpa(q, m.repeated(k), m.repeated(v)))


def growing(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    cos, sin = tables(q.shape[2], q)
    scale = torch.arange(q.shape[2], dtype=q.dtype)[:, None] + 1
    return m.out(sdpa(rotated(q, cos, sin) * scale, m.repeated(rotated(k, cos, sin) / scale), m.repeated(v)))


def apart(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    cos, sin = tables(q.shape[2], q)
    return m.out(sdpa(rotated(q, cos, sin), m.repeated(rotated(k, sin, cos)), m.repeated(v)))


@pytest.mark.parametrize("attend", [partial, pairs, growing, apart], ids=lambda f: f.__name__)
def test_rotations_of_any_spelling_keep_their_values(attend: Any, tmp_path: Path) -> None:
    model = Attention(attend, bias=True)
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_queries_and_keys_are_rotated_in_one(tmp_path: Path) -> None:
    model = Attention(plain, bias=True)
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["Slice"] == ops["Neg"] == ops["Repeat"] == 0
    # weights, biases, angles, one rotation; the others are shapes
    rotations = [
        node
        for node in ir.load(bundle.path / "model.onnx").graph
        if node.op_type == "Concat" and _makers(node) == ["Split", "Split"]
    ]
    assert len(rotations) == 1


def _makers(node: ir.Node) -> list[str]:
    return [value.producer().op_type for value in node.inputs if value is not None and value.producer() is not None]


def with_cache(m: Attention, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    table = tables(q.shape[2], q)
    k, v = torch.cat((keys, rotated(k, *table)), 2), torch.cat((values, v), 2)
    seen = torch.arange(k.shape[2])[None] <= torch.arange(q.shape[2])[:, None] + keys.shape[2]
    return m.out(sdpa(rotated(q, *table), m.repeated(k), m.repeated(v), attn_mask=seen)), k, v


def test_keys_and_values_of_the_past_go_in_and_out(tmp_path: Path) -> None:
    def call(batch: int, seq: int, past: int) -> tuple[Tensor, ...]:
        return (*rows(batch, seq), *(torch.randn(batch, 2, past, SIZE) for _ in range(2)))

    model = Attention(with_cache)
    bundle, ops = export(model, call(2, 5, 7), tmp_path)
    assert ops["MatMul"] == 4
    same(bundle, model, [call(2, 5, 7), call(1, 1, 3), call(3, 4, 0), call(2, 1, 8), call(0, 2, 2)])


def returned(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return m.out(sdpa(q, m.repeated(k), m.repeated(v))), k, v


def rotated_returned(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    table = tables(q.shape[2], q)
    q, k = rotated(q, *table), rotated(k, *table)
    return m.out(sdpa(q, m.repeated(k), m.repeated(v))), k, v


def repeated_returned(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    k, v = m.repeated(k), m.repeated(v)
    return m.out(sdpa(q, k, v)), k, v


def context_returned(m: Attention, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return sdpa(q, m.repeated(k), m.repeated(v))


@pytest.mark.parametrize(
    "attend", [returned, rotated_returned, repeated_returned, context_returned], ids=lambda f: f.__name__
)
def test_what_the_model_returns_is_returned(attend: Any, tmp_path: Path) -> None:
    model = Attention(attend)
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_a_part_of_a_split_may_be_returned(tmp_path: Path) -> None:
    class Joint(Attention):
        def __init__(self) -> None:
            super().__init__(plain)
            self.joint = nn.Linear(WIDTH, 10 * SIZE)

        def forward(self, x: Tensor, *_: Tensor) -> Any:
            heads = self.joint(self.norm(x)).view(*x.shape[:2], 10, SIZE).transpose(1, 2)
            q, k, v = heads.split([6, 2, 2], 1)
            return self.attend(self, q, k, v), v

    model = Joint()
    bundle, _ = export(model, EXAMPLE, tmp_path)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_keys_may_come_from_elsewhere(tmp_path: Path) -> None:
    class Cross(Attention):
        def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
            return self.attend(self, *self.split(x, y))

    model = Cross(interleaved, bias=True)
    call = [(*rows(*one), *rows(*other)) for one, other in (((2, 5), (2, 7)), ((1, 1), (1, 1)), ((3, 7), (3, 4)))]
    bundle, ops = export(model, call[0], tmp_path)
    assert ops["MatMul"] == 5  # keys and values in one
    same(bundle, model, call)


def test_weights_keep_their_names_and_may_be_tied_and_read_by_others(tmp_path: Path) -> None:
    class Tied(Attention):
        def __init__(self) -> None:
            super().__init__(plain, groups=6)
            self.k.weight = self.q.weight

        def forward(self, x: Tensor, *_: Tensor) -> Any:
            return super().forward(x) @ self.v.weight.mT, self.v.weight

    model = Tied()
    bundle, _ = export(model, EXAMPLE, tmp_path)
    assert {"k.weight", "v.weight"} <= set(ir.load(bundle.path / "model.onnx").graph.initializers)
    same(bundle, model, [rows(*shape) for shape in SHAPES])


def test_projections_that_differ_are_joined_only_with_their_like(tmp_path: Path) -> None:
    class Other(Attention):
        """Keys without bias, as in Whisper, and values of another size."""

        def __init__(self) -> None:
            super().__init__(plain, groups=6, bias=True)
            self.k, self.v = nn.Linear(WIDTH, 6 * SIZE, bias=False), nn.Linear(WIDTH, 6 * 3)

        def forward(self, x: Tensor, *_: Tensor) -> Any:
            x = self.norm(x)
            q, k, v = (p(x).view(*x.shape[:2], 6, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
            return sdpa(q, k, v)

    model = Other()
    bundle, ops = export(model, EXAMPLE, tmp_path)
    assert ops["MatMul"] == 5
    same(bundle, model, [rows(*shape) for shape in SHAPES[:4]])


@pytest.mark.parametrize("dims", [{"x": {}}, {"x": {0: "batch"}}, {"x": {1: "seq"}}], ids=["none", "batch", "seq"])
def test_sizes_that_are_fixed_are_numbers(dims: dict[str, Any], tmp_path: Path) -> None:
    model = Attention(plain)
    bundle, ops = export(model, EXAMPLE, tmp_path, dynamic_shapes=dims)
    assert ops["Repeat"] == 0
    free = set(dims["x"])
    same(bundle, model, [rows(*(7 if axis in free else size for axis, size in enumerate((2, 5)))), EXAMPLE])


def test_half_types_are_straightened_alike(tmp_path: Path) -> None:
    model = Attention(plain, bias=True)
    call = (*EXAMPLE, mask("b1qk", 2, 5))
    single, half, brain = (export(model, call, tmp_path, precision=p)[1] for p in ("fp32", "fp16", "bf16"))
    for op in ("MatMul", "Split", "Repeat", "IsNaN", "Slice", "Transpose", "Softmax"):
        assert single[op] == half[op] == brain[op]
    bundle, _ = export(model, call, tmp_path, precision="fp16")
    inputs = [(x.half(), seen) for shape in SHAPES[:4] for (x,), seen in [(rows(*shape), mask("b1qk", *shape))]]
    same(bundle, model.half(), inputs, unit=2.0**-14)


def weighing(axes: str, batch: int, seq: int) -> Tensor:
    """A mask of floats that hides all keys from some queries, as ``mask`` does."""
    seen = mask(axes, batch, seq)
    return torch.where(seen, torch.randn(seen.shape), -math.inf)


@pytest.mark.parametrize(
    ("axes", "groups"), [("b1qk", 2), ("b1qk", 6), ("b11k", 1), ("bhqk", 2), ("qk", 2), ("hqk", 2), ("b1q1", 2)]
)
def test_a_query_from_which_minus_infinity_hides_all_keys_gets_nan(axes: str, groups: int, tmp_path: Path) -> None:
    model = Attention(masked, groups=groups)
    bundle, ops = export(model, (*EXAMPLE, weighing(axes, 2, 5)), tmp_path)
    assert ops["ReduceMax"] == 1
    calls = [(*rows(*shape), weighing(axes, *shape)) for shape in SHAPES]
    same(bundle, model, calls)
    session = bundle.session("onnxruntime")
    for x, numbers in calls[:4]:
        blind = numbers.isneginf().all(-1, keepdim=True).expand(x.shape[0], 6, x.shape[1], SIZE)
        assert blind.any()
        assert (session(x, numbers)[0][blind] == 0).all()


def test_a_row_of_the_least_finite_number_gets_zero_in_place_of_the_mean(tmp_path: Path) -> None:
    model = Attention(masked)

    def call(batch: int, seq: int) -> tuple[Tensor, Tensor]:
        numbers = weighing("b1qk", batch, seq)
        return (*rows(batch, seq), numbers.masked_fill(numbers.isneginf(), torch.finfo(torch.float32).min))

    bundle, _ = export(model, call(2, 5), tmp_path)
    for x, numbers in (call(*shape) for shape in SHAPES[:4]):  # PyTorch in float64 would not lose the scores beside it
        expected = model(x, numbers)
        torch.testing.assert_close(bundle.session("onnxruntime")(x, numbers)[0], expected, rtol=0, atol=2e-5)


def test_a_nan_in_queries_and_values_is_lost_where_minus_infinity_hides_all_keys(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=numbers)

    q, k, v = torch.randn(3, 2, 3, 5, SIZE)
    numbers = weighing("b1qk", 2, 5)
    numbers[0, 0, :3] = -math.inf
    names = ("q", "k", "v", "numbers")
    bundle, _ = export(Bare(), (q, k, v, numbers), tmp_path, dynamic_shapes={name: {} for name in names})
    q[0, :, 1], q[0, :, 2] = math.nan, math.inf
    v[:, 0, 0, :2] = torch.tensor([math.nan, math.inf])
    (found,), expected = bundle.session("onnxruntime")(q, k, v, numbers), Bare()(q, k, v, numbers)
    assert (expected[0, 1, 0] == 0).all()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5, equal_nan=True)


def test_pytorchs_own_layer_gives_nan_for_a_sequence_of_padding_alone(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.RMSNorm(WIDTH), nn.MultiheadAttention(WIDTH, 3, batch_first=True)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            y, numbers = self.norm(x), torch.zeros(x.shape[:2], dtype=x.dtype).masked_fill(padding, -math.inf)
            result: Tensor = self.attention(y, y, y, key_padding_mask=numbers, need_weights=False)[0]
            return x + result

    model, padding = Layer().eval(), torch.tensor([[False] * 3 + [True] * 2, [True] * 5])
    bundle, _ = export(model, (*EXAMPLE, padding), tmp_path)
    assert torch.isfinite(bundle.session("onnxruntime")(*EXAMPLE, padding)[0]).all()
    same(bundle, model, [(*EXAMPLE, padding), (*EXAMPLE, ~padding)])


def finite(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
    return m.out(sdpa(q, m.repeated(k), m.repeated(v), attn_mask=torch.where(seen, 0.0, -9.0)[:, None]))


def tilted(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
    return m.out(sdpa(q, m.repeated(k), m.repeated(v), attn_mask=seen[:, None].to(q.dtype)))


def first(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
    return m.out(sdpa(q * seen.sum(), m.repeated(k), m.repeated(v), is_causal=True))


def triangle(m: Attention, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Any:
    place = torch.arange(q.shape[2])
    numbers = torch.where(place[None] <= place[:, None], 0.0, -math.inf)
    return m.out(sdpa(q * seen.sum(), m.repeated(k), m.repeated(v), attn_mask=numbers))


@pytest.mark.parametrize("attend", [finite, tilted, first, triangle], ids=lambda f: f.__name__)
def test_a_mask_that_can_hide_nothing_is_asked_all_the_same(attend: Any, tmp_path: Path) -> None:
    model = Attention(attend)
    bundle, ops = export(model, (*EXAMPLE, mask("bqk", 2, 5)), tmp_path)
    assert ops["ReduceMax"] == 0
    same(bundle, model, [(*rows(*shape), mask("bqk", *shape)) for shape in SHAPES[:4]])
