"""Finding and building the native libraries."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rmsnorm_deploy import native, native_build
from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rmsnorm_deploy"


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small sources in place of plugins/ that build in a moment."""
    if not all(map(shutil.which, ("cmake", "c++"))):
        pytest.skip("no CMake or no C++ compiler here")
    folder = tmp_path / "plugins"
    (folder / "kernels" / "cpu").mkdir(parents=True)
    (folder / "kernels" / "cpu" / "a.cpp").write_text('extern "C" int answer() { return 42; }\n')
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES CXX)\n"
        "set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)\n"
        "add_library(rmsnorm_deploy_cpu SHARED kernels/cpu/a.cpp)\n"
    )
    monkeypatch.setattr(native, "plugins_folder", lambda: folder)
    monkeypatch.setattr(native_build, "plugins_folder", lambda: folder)
    return folder


def put(folder: Path, group: str, kind: str, identity: str, created: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    file = folder / (native.GROUPS[group].libraries[kind] + native.SUFFIX)
    file.write_bytes(b"")
    (folder / native.STAMP).write_text(json.dumps({"group": group, "identity": identity, "created": created}))
    return file


def test_nothing_is_found_where_nothing_was_built(cache: Path) -> None:
    assert all(native.find_library(kind) is None for kind in native.KINDS)
    assert [item.kind for item in native.status()] == list(native.KINDS)
    with pytest.raises(BackendUnavailable, match=r"native build"):
        native.library_path()
    with pytest.raises(BackendUnavailable, match=r"native build"):
        native.register(object())


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="no library 'gpu'"):
        native.find_library("gpu")
    with pytest.raises(InputError, match="no group 'gpu'"):
        native_build.build(("gpu",))


def test_only_a_library_of_these_sources_is_used(cache: Path) -> None:
    put(cache / "cpu-old", "cpu", "ort", "another hash")
    assert native.find_library("ort") is None
    right = put(cache / "cpu-new", "cpu", "ort", native.identity("cpu"))
    assert native.find_library("ort") == right
    assert native.library_path() == str(right)


def test_the_newest_of_several_builds_is_used(cache: Path) -> None:
    put(cache / "cuda-a", "cuda", "cuda", native.identity("cuda"), created=5.0)
    newest = put(cache / "cuda-b", "cuda", "cuda", native.identity("cuda"), created=7.0)
    assert native.find_library("cuda") == newest


def test_a_broken_stamp_is_no_library(cache: Path) -> None:
    folder = put(cache / "cpu-x", "cpu", "ort", native.identity("cpu")).parent
    for text in ("", "[1, 2]", "{", '{"group": 3}'):
        (folder / native.STAMP).write_text(text)
        assert native.find_library("ort") is None


def test_a_wheels_library_comes_first_and_must_be_of_its_version(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rmsnorm_deploy

    monkeypatch.setattr(native, "plugins_folder", lambda: None)
    monkeypatch.setattr(native_build, "plugins_folder", lambda: None)
    monkeypatch.setattr(native, "wheel_folder", lambda: tmp_path / "lib")
    put(cache / "cpu-x", "cpu", "ort", native.identity("cpu"))
    mine = put(tmp_path / "lib", "cpu", "ort", native.wheel_identity(rmsnorm_deploy.__version__))
    assert native.find_library("ort") == mine
    (tmp_path / "lib" / native.STAMP).write_text(
        json.dumps({"group": "cpu", "identity": native.wheel_identity("0.0.0")})
    )
    assert native.find_library("ort") == cache / "cpu-x" / mine.name
    with pytest.raises(InputError, match="no C\\+\\+ sources"):
        native_build.build()


def test_build_finds_what_it_built_and_builds_once(cache: Path, sources: Path) -> None:
    first = native_build.build(quiet=True)[0]
    library = native.find_library("cpu")
    assert library is not None
    assert library.parent == first
    made = library.stat().st_mtime_ns
    assert native_build.build(quiet=True) == [first]
    assert library.stat().st_mtime_ns == made
    assert native_build.build(quiet=True, force=True) == [first]
    assert library.stat().st_mtime_ns != made
    assert {path.name for path in cache.iterdir()} == {first.name}


def test_a_changed_source_is_built_anew(cache: Path, sources: Path) -> None:
    before = native_build.build(quiet=True)
    (sources / "kernels" / "cpu" / "a.cpp").write_text('extern "C" int answer() { return 43; }\n')
    assert native.find_library("cpu") is None
    assert native_build.build(quiet=True) != before


def test_other_options_are_another_build(cache: Path, sources: Path) -> None:
    assert native_build.build(quiet=True) != native_build.build(quiet=True, definitions=["-DA=1"])


def test_a_failed_build_says_what_the_compiler_said_and_leaves_nothing(cache: Path, sources: Path) -> None:
    (sources / "kernels" / "cpu" / "a.cpp").write_text("int broken( { }\n")
    with pytest.raises(DeployError, match=r"failed with status .*error"):
        native_build.build(quiet=True)
    assert list(cache.iterdir()) == []
    (sources / "kernels" / "cpu" / "a.cpp").write_text("int fine();\n")
    (sources / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.20)\nproject(p LANGUAGES CXX)\n")
    with pytest.raises(InputError, match="nothing made librmsnorm_deploy_cpu"):
        native_build.build(quiet=True)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(("present", "missing"), [("c++", "CMake 3.20 or newer"), ("cmake", r"no C\+\+ compiler here")])
def test_without_a_tool_the_message_says_which(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, present: str, missing: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / present).write_text("#!/bin/sh\necho a tool\n")
    (tools / present).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailable, match=missing):
        native_build.build(quiet=True)


@pytest.mark.parametrize(
    ("tool", "script", "words"),
    [
        ("c++", "exit 1", "not in order"),
        ("cmake", "exit 1", "not in order"),
        ("cmake", "echo cmake version 3.16.3", r"3\.20 or newer is needed .*3\.16\.3"),
    ],
)
def test_a_tool_that_will_not_do_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, script: str, words: str
) -> None:
    """So that an installation goes on without the libraries, instead of failing in the middle of their build."""
    for name in ("c++", "cmake"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script if name == tool else 'echo cmake version 4.1.0'}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendUnavailable, match=words):
        native_build.check_tools("cpu")


def test_nvcc_is_found_where_the_toolkit_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDACXX", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert native_build.find_nvcc() == str(nvcc)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.delenv("CUDA_HOME")
    assert native_build.find_nvcc() == str(nvcc)


def test_the_cuda_kernels_are_linked_beside_the_custom_ops(cache: Path, sources: Path) -> None:
    cuda = put(cache / "cuda-a", "cuda", "cuda", native.identity("cuda"))
    text = (sources / "CMakeLists.txt").read_text()
    (sources / "CMakeLists.txt").write_text(text + "add_library(rmsnorm_deploy_ort SHARED kernels/cpu/a.cpp)\n")
    put(cache / "cuda-b", "cuda", "cuda", native.identity("cuda"))
    folder = native_build.build(quiet=True)[0]
    assert (folder / cuda.name).resolve().parent.parent == cache


def test_the_command_lists_every_kind_and_ends_with_the_errors_status(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native.main(["status"]) == 0
    assert all(kind in capsys.readouterr().out for kind in ["ort"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.main(["build"]) == BackendUnavailable.exit_code
    assert "no-such-compiler" in capsys.readouterr().err


def test_importing_the_module_loads_nothing_heavy() -> None:
    code = "import sys, rmsnorm_deploy.native; print({'torch', 'onnx', 'numpy', 'onnxruntime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_carries_the_libraries_where_there_is_a_compiler(tmp_path: Path, compiler: bool) -> None:
    if compiler and not all(map(shutil.which, ("cmake", "c++"))):
        pytest.skip("no CMake or no C++ compiler here")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **({} if compiler else {"CXX": "none"})}
    source = tmp_path / "source"
    skip = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=skip)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("rmsnorm_deploy/lib/librmsnorm_deploy_ort") for name in names) == compiler
    assert wheel.name.endswith("-none-any.whl") != compiler
    if not compiler:
        return
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    code = "from rmsnorm_deploy import native; print(native.library_path()); print(native.load('cpu').rmsnorm_cpu)"
    done = subprocess.run([sys.executable, "-c", code], cwd=installed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
