"""Inputs made from a manifest: shapes within the limits, values that provoke, ids that exist, the user's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.samples import dim_size, load_samples, make_samples


def manifest(*inputs: dict[str, Any], **dims: tuple[int, int | None, int | None]) -> dict[str, Any]:
    limits = {name: {"example": e, "min": low, "max": high} for name, (e, low, high) in dims.items()}
    filled = [{"path": item["name"], "high": None, **item} for item in inputs]
    return {"signature": {"parameters": [], "inputs": filled, "outputs": []}, "dims": limits}


HIDDEN = {"name": "hidden", "dtype": "float32", "shape": ["batch", "seq", 16]}
IDS = {"name": "ids", "dtype": "int64", "shape": ["batch", "seq"], "high": 100}


def by_name(samples: list[Any]) -> dict[str, Any]:
    return {sample.name: sample for sample in samples}


def test_several_shapes_are_tried_at_once() -> None:
    samples = by_name(make_samples(manifest(HIDDEN, batch=(2, 0, None), seq=(5, 0, None))))
    shapes = {name: sample.feeds["hidden"].shape for name, sample in samples.items() if name.startswith("random")}
    assert shapes == {
        "random, example shape": (2, 5, 16),
        "random, one row": (1, 5, 16),
        "random, prime sizes": (7, 11, 16),
        "random, no rows": (0, 5, 16),
    }


def test_sizes_outside_the_limits_are_left_out() -> None:
    samples = by_name(make_samples(manifest(HIDDEN, batch=(4, 3, 4), seq=(5, 5, 12))))
    assert {sample.feeds["hidden"].shape for sample in samples.values()} == {(4, 5, 16), (4, 11, 16)}
    assert "random, no rows" not in samples
    assert "random, one row" not in samples


def test_a_least_size_is_kept_by_every_sample() -> None:
    samples = make_samples(manifest(HIDDEN, batch=(2, 1, None), seq=(5, 2, None)))
    assert all(sample.feeds["hidden"].shape[0] >= 1 and sample.feeds["hidden"].shape[1] >= 2 for sample in samples)
    assert by_name(samples)["random, one row"].feeds["hidden"].shape == (1, 5, 16)
    assert "random, no rows" not in by_name(samples)


def test_a_static_model_has_one_shape() -> None:
    samples = make_samples(manifest({**HIDDEN, "shape": [2, 16]}))
    assert {sample.feeds["hidden"].shape for sample in samples} == {(2, 16)}
    assert sum(sample.kind == "random" for sample in samples) == 1


@pytest.mark.parametrize(
    ("dim", "size"),
    [
        (7, 7), ("seq", 5), ("2*seq", 10), ("seq + 1", 6), ("batch*seq - 3", 7), ("seq//2", 2), ("-seq + 9", 4),
        ("Max(seq, 8)", 8), ("min(batch, seq)", 2), ("u0", 3), ("__import__('os')", 3), ("seq +", 3),
    ],
)  # fmt: skip
def test_derived_dims_are_worked_out_and_unknown_ones_are_free(dim: Any, size: int) -> None:
    assert dim_size(dim, {"batch": 2, "seq": 5}, {"batch": {"example": 2}, "seq": {"example": 5}}) == size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_adversarial_floats_are_what_they_say(dtype: str) -> None:
    spec = {**HIDDEN, "dtype": dtype}
    samples = by_name(make_samples(manifest(spec, batch=(2, 0, None), seq=(4, 0, None))))
    rows = {name: sample.feeds["hidden"].astype(np.float64).reshape(-1, 16) for name, sample in samples.items()}
    assert all(
        sample.feeds["hidden"].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)) for sample in samples.values()
    )
    assert all(np.isfinite(values).all() for values in rows.values())
    assert (rows["zero rows"] == 0).all(-1).sum() == 4
    assert np.abs(rows["tiny"]).max() < 0.1
    normal = float(ml_dtypes.finfo(samples["subnormal"].feeds["hidden"].dtype).smallest_normal)
    assert (np.abs(rows["subnormal"]) < normal).mean() > 0.9
    assert rows["subnormal"].any()
    assert np.abs(rows["huge"]).max() > 1e4
    if dtype == "float32":
        assert np.isfinite(np.float32(rows["huge"]) ** 2).all()
    assert ((np.abs(rows["spiky"]) > 100).sum(-1) == 1).all()
    assert (np.sort(rows["one hot"], -1)[:, -2:] == [0, 1]).all()
    big, small = np.abs(rows["mixed magnitudes"]).max(-1), np.abs(rows["mixed magnitudes"]).min(-1)
    assert (big / np.maximum(small, 1e-300) > 1e5).all()


def test_ids_stay_in_the_table_and_reach_both_ends() -> None:
    samples = by_name(make_samples(manifest(IDS, batch=(2, 0, None), seq=(5, 0, None))))
    assert {"edge ids", "one id throughout"} <= set(samples)
    assert not {"tiny", "huge"} & set(samples)
    for sample in samples.values():
        ids = sample.feeds["ids"]
        assert ids.dtype == np.int64
        assert not ids.size or (ids.min() >= 0 and ids.max() < 100)
    assert set(samples["edge ids"].feeds["ids"].ravel()) == {0, 99}
    assert len(set(samples["one id throughout"].feeds["ids"].ravel())) == 1
    assert len(set(samples["random, example shape"].feeds["ids"].ravel())) > 3


def test_masks_hide_nothing_and_positions_count_up() -> None:
    inputs = (
        IDS,
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch", "seq"]},
        {"name": "bool_mask", "dtype": "bool", "shape": ["batch", "seq"]},
        {"name": "additive_mask", "dtype": "float32", "shape": ["batch", 1, "seq", "seq"]},
        {"name": "position_ids", "dtype": "int64", "shape": ["batch", "seq"]},
        {"name": "flags", "dtype": "bool", "shape": ["seq"]},
        {"name": "steps", "dtype": "int32", "shape": []},
    )
    for sample in make_samples(manifest(*inputs, batch=(2, 0, None), seq=(5, 0, None))):
        if not sample.hides:
            assert (sample.feeds["attention_mask"] == 1).all()
            assert sample.feeds["bool_mask"].all()
            assert not sample.feeds["additive_mask"].any()
        assert (sample.feeds["position_ids"] == np.arange(sample.dims["seq"])).all()
        assert sample.feeds["flags"].dtype == bool
        assert sample.feeds["steps"].shape == ()


def test_one_sample_has_masks_that_hide_something() -> None:
    inputs = (
        HIDDEN,
        {"name": "attention_mask", "dtype": "int64", "shape": ["batch", "seq"]},
        {"name": "key_padding_mask", "dtype": "bool", "shape": ["batch", "seq"]},
        {"name": "additive_mask", "dtype": "float16", "shape": ["batch", 1, "seq", "seq"]},
    )
    samples = make_samples(manifest(*inputs, batch=(2, 0, None), seq=(5, 0, None)))
    (hiding,) = [sample for sample in samples if sample.hides]
    assert (hiding.feeds["attention_mask"] == [1, 0, 1, 0, 1]).all()
    assert (hiding.feeds["key_padding_mask"] == [False, True, False, True, False]).all()
    assert (hiding.feeds["additive_mask"] == [0, -10, 0, -10, 0]).all()
    assert not any(sample.feeds["key_padding_mask"].any() for sample in samples if not sample.hides)
    assert not any(sample.hides for sample in make_samples(manifest(HIDDEN, batch=(2, 0, None), seq=(5, 0, None))))


def test_the_seed_alone_decides() -> None:
    spec = manifest(HIDDEN, IDS, batch=(2, 0, None), seq=(5, 0, None))
    first, again, other = make_samples(spec, seed=3), make_samples(spec, seed=3), make_samples(spec, seed=4)
    for a, b, c in zip(first, again, other, strict=True):
        assert all(np.array_equal(a.feeds[name], b.feeds[name]) for name in a.feeds)
        if a.kind == "random" and a.feeds["hidden"].size:
            assert not np.array_equal(a.feeds["hidden"], c.feeds["hidden"])


def test_another_input_changes_no_value() -> None:
    alone = by_name(make_samples(manifest(HIDDEN, batch=(2, 0, None), seq=(5, 0, None))))
    both = by_name(make_samples(manifest(IDS, HIDDEN, batch=(2, 0, None), seq=(5, 0, None))))
    assert all(np.array_equal(sample.feeds["hidden"], both[name].feeds["hidden"]) for name, sample in alone.items())


def test_adversarial_can_be_left_out() -> None:
    samples = make_samples(manifest(HIDDEN, batch=(2, 0, None), seq=(5, 0, None)), adversarial=False)
    assert {sample.kind for sample in samples} == {"random"}


def test_user_files_are_cast_to_the_models_dtypes(tmp_path: Path) -> None:
    spec = manifest({**HIDDEN, "dtype": "bfloat16"}, {**IDS, "dtype": "int32"}, batch=(2, 0, None), seq=(5, 0, None))
    np.savez(tmp_path / "mine.npz", hidden=np.ones((1, 2, 16)), ids=np.asarray([[3, 99]]))
    (sample,) = load_samples(tmp_path / "mine.npz", spec)
    assert (sample.kind, sample.name) == ("user", "user, mine.npz")
    assert sample.feeds["hidden"].dtype == ml_dtypes.bfloat16
    assert sample.feeds["ids"].dtype == np.int32


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"hidden": np.ones((1, 2, 16))}, "lacks input 'ids'"),
        ({"hidden": np.ones((1, 2, 16)), "ids": np.ones((1, 2), int), "x": np.ones(1)}, "unknown input 'x'"),
        ({"hidden": np.ones((2, 16)), "ids": np.ones((1, 2), int)}, "'hidden' has rank 2, the model takes rank 3"),
        ({"hidden": np.ones((1, 2, 17)), "ids": np.ones((1, 2), int)}, "axis 2 was fixed at 16"),
        ({"hidden": np.ones((1, 2, 16)), "ids": np.ones((1, 3), int)}, "'seq'"),
        ({"hidden": np.ones((1, 2, 16)), "ids": np.full((1, 2), 100)}, "ids outside 0..99"),
        ({"hidden": np.ones((1, 2, 16)), "ids": np.full((1, 2), 0.5)}, "'ids' is float64"),
        ({"hidden": np.full((1, 2, 16), "a"), "ids": np.ones((1, 2), int)}, "'hidden' is <U1"),
    ],
)
def test_user_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load_samples(tmp_path / "mine.npz", manifest(HIDDEN, IDS, batch=(2, 0, None), seq=(5, 0, None)))


def test_files_that_are_no_npz_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "single.npy", np.ones(3))
    for name, message in (("text.npz", "not an .npz"), ("single.npy", "not an .npz"), ("none.npz", "no such file")):
        with pytest.raises(InputError, match=message):
            load_samples(tmp_path / name, manifest(HIDDEN))
