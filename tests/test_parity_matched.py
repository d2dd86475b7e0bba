"""Truth at the norms from the one float64 pass: found by its size, and never another value's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_bundles import bundle

from rmsnorm_deploy import export_model
from rmsnorm_deploy.parity import run as parity_run
from rmsnorm_deploy.parity.backends import HeldBundle
from rmsnorm_deploy.parity.matched import Nearest
from rmsnorm_deploy.parity.normcheck import site_truth
from rmsnorm_deploy.parity.run import prepare
from rmsnorm_deploy.parity.scratch import Scratch
from rmsnorm_deploy.parity.sites import find_sites


def found(seen: dict[str, np.ndarray[Any, Any]], values: list[torch.Tensor]) -> Any:
    nearest = Nearest(seen)
    for value in values:
        nearest(None, value)
    return nearest.found()


@pytest.mark.parametrize("which", ["float32", "float16"])
def test_what_is_found_is_what_the_graph_before_fusing_makes_in_float64(which: str) -> None:
    made = HeldBundle(bundle(which))
    cases = prepare(made).sites
    sites = find_sites(made)
    assert sites is not None
    with Scratch() as scratch:
        wanted = site_truth(made, sites, [case.sample for case in cases], scratch)
    assert len(cases) == 2
    for case, named in zip(cases, wanted, strict=True):
        assert (case.named, named.named) == (False, True)
        assert case.before.keys() == sites.dtypes_before().keys()
        for name in sites.dtypes_before():
            np.testing.assert_allclose(case.truth[name], named.truth[name], rtol=1e-6, atol=1e-7)


def test_of_two_values_that_differ_little_the_nearer_is_found_whichever_comes_first() -> None:
    right = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = right * (1 + 1e-5)
    seen = {"x": right.numpy().astype(np.float32)}
    for values in ([right, wrong], [wrong, right]):
        np.testing.assert_array_equal(found(seen, values)["x"], right.numpy())


def test_a_value_is_kept_as_it_was_when_it_is_written_to_afterwards() -> None:
    value = torch.ones(3, dtype=torch.float64)
    nearest = Nearest({"x": np.ones(3, np.float32)})
    nearest(None, value)
    value.zero_()
    kept = nearest.found()
    assert kept is not None
    np.testing.assert_array_equal(kept["x"], np.ones(3))


def test_no_value_stands_for_one_that_it_does_not_agree_with() -> None:
    seen = {"x": np.arange(10000, dtype=np.float32).reshape(100, 100)}
    value = torch.from_numpy(seen["x"].astype(np.float64))
    assert found(seen, [value]) is not None
    one_off = value.clone()
    one_off.view(-1)[::50] *= 1.1  # may be passed over where a few places are looked at
    for other in (one_off, value.T.contiguous(), value * 1.01, value[:99], value.float(), value * torch.nan):
        assert found(seen, [other]) is None
    assert found({"x": np.full(4, np.nan, np.float32)}, [torch.full((4,), torch.nan, dtype=torch.float64)]) is None


def test_empty_and_zero_values_are_found() -> None:
    zeros = np.zeros((3, 4), np.float32)
    kept = found({"x": zeros, "none": zeros[:0]}, [torch.zeros(3, 4).double(), torch.zeros(0, 4).double()])
    assert {name: array.shape for name, array in kept.items()} == {"x": (3, 4), "none": (0, 4)}


def test_truth_comes_from_the_graph_before_fusing_where_the_program_has_not_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    made = HeldBundle(export_model(Norm(), (torch.randn(2, 3, 16),), out_dir=tmp_path / "b"))
    assert not any(case.named for case in prepare(made).sites)
    monkeypatch.setattr(parity_run, "values_before", lambda *_: [])  # as where ONNX Runtime lacks a kernel
    named = prepare(made).sites
    assert named
    assert all(case.named for case in named)
