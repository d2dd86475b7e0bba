"""The command: exit statuses, one line an error, stdout and stderr, and what reaches the pipeline."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rmsnorm_deploy
from rmsnorm_deploy.cli import run_command
from rmsnorm_deploy.errors import BackendUnavailable, ParityError
from rmsnorm_deploy.export import cli, pipeline

ROOT = Path(__file__).parents[1]


class Recorder:
    """In place of ``pipeline.run``: keeps what it was called with and writes the files of a bundle."""

    def __init__(self) -> None:
        self.parity: dict[str, Any] | None = {"ok": True}
        self.error: BaseException | None = None
        self.source: Any = None
        self.options: Any = None

    def __call__(self, source: Any, options: Any, progress: Any) -> Any:
        self.source, self.options = source, options
        with progress("trace"):
            source.notes.append("a choice of the tracer")
        if self.error:
            raise self.error
        options.out_dir.mkdir(parents=True, exist_ok=True)
        (options.out_dir / "manifest.json").write_text(json.dumps({"norms": [{"name": "n"}], "left": []}))
        if self.parity is not None:
            (options.out_dir / "parity.json").write_text(json.dumps(self.parity))
        return SimpleNamespace(path=options.out_dir)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(pipeline, "run", recorder)
    monkeypatch.setattr(cli, "_print_summary", lambda bundle, result: print("SUMMARY"))
    monkeypatch.setattr("rmsnorm_deploy.cli.quiet", lambda debug: None)
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 2)), tmp_path / "model.pt")
    return recorder


def error_of(capsys: pytest.CaptureFixture[str], *argv: str | Path, status: int = 2) -> str:
    """The one error line of a run that must end with ``status`` and say nothing on stdout."""
    assert cli.main([str(a) for a in argv]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert err.splitlines()[-1] == errors[0]
    return errors[0]


def test_a_run_ends_with_zero_and_keeps_stdout_for_the_result(
    run: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["model.pt"]) == 0
    out, err = capsys.readouterr()
    assert out == "SUMMARY\n"
    assert "load" in err
    assert "trace" in err
    assert "inputs inferred from the first layer 0 (RMSNorm): input=float32[batch,8]" in err
    assert err.count("a choice of the tracer") == 1
    assert run.options == pipeline.Options(Path("model.bundle"))


def test_every_option_reaches_the_pipeline(run: Recorder, tmp_path: Path) -> None:
    argv = ["model.pt", "--input", "input=float32[b,s,8]", "--dim", "s=1:9", "--precision", "fp16", "--opset", "20"]
    argv += ["--out", "there/b", "--force", "--targets", "onnxruntime, pytorch", "--no-check", "--no-benchmark"]
    assert cli.main(argv) == 0
    assert run.options == pipeline.Options(
        Path("there/b"), "fp16", 20, ("onnxruntime", "pytorch"), check=False, benchmark=False, force=True
    )
    assert run.source.dims == {"input": {0: "b", 1: "s"}}
    assert run.source.ranges == {"s": (1, 9)}


def test_classes_and_recipes_reach_the_loader(
    run: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "from torch import nn\nclass Own(nn.Linear): pass\ndef build(): return Own(8, 2)\n"
    (tmp_path / "own_for_cli.py").write_text(text)
    namespace: dict[str, Any] = {"__name__": "own_for_cli"}
    exec(text, namespace)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "own_for_cli", SimpleNamespace(Own=namespace["Own"]))
        torch.save(namespace["Own"](8, 2), "own.pt")
    torch.save({"ema": namespace["Own"](8, 2).state_dict()}, "weights.pt")
    assert "own_for_cli.Own" in error_of(capsys, "own.pt")
    assert cli.main(["own.pt", "--import", "own_for_cli.py", "--force"]) == 0
    assert cli.main(["own.pt", "--allow-class", "own_for_cli.Own", "--force"]) == 0
    assert cli.main(["weights.pt", "--recipe", "own_for_cli.py", "--state-key", "ema", "--force"]) == 0
    assert cli.main(["own_for_cli.py", "--force"]) == 0


def test_json_is_all_there_is_on_stdout(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model.pt", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["bundle"] == "model.bundle"
    assert found["manifest"]["norms"] == [{"name": "n"}]
    assert found["parity"] == {"ok": True}
    assert found["benchmark"] is None
    assert any("inferred" in note for note in found["notes"])


def test_failed_parity_is_status_one_with_the_summary_still_there(
    run: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.parity = {"ok": False}
    assert cli.main(["model.pt"]) == 1
    assert capsys.readouterr().out == "SUMMARY\n"
    run.parity, run.error = None, ParityError("norm 3 differs")
    assert error_of(capsys, "model.pt", "--force", status=1) == "error: norm 3 differs"


def test_a_backend_asked_for_and_not_there_is_status_three(
    run: Recorder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rmsnorm_deploy import runtime

    status = SimpleNamespace(
        name="tensorrt", available=False, builds=False, detail="no libnvinfer", install="pip install x"
    )
    monkeypatch.setattr(runtime, "available", lambda: [status])
    message = error_of(capsys, "model.pt", "--targets", "tensorrt", status=3)
    assert message == "error: --targets tensorrt: no libnvinfer; to get it: pip install x"
    assert run.source is None
    status.builds = True
    assert cli.main(["model.pt", "--targets", "tensorrt"]) == 0
    capsys.readouterr()
    run.error = BackendUnavailable("gone")
    assert error_of(capsys, "model.pt", "--force", status=3) == "error: gone"


def test_an_unknown_target_is_bad_usage(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--targets tensorflow: not a backend; there is onnxruntime" in error_of(
        capsys, "model.pt", "--targets", "tensorflow"
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "required: MODEL"),
        (["model.pt", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["model.pt", "--no-ch"], "unrecognized arguments: --no-ch"),
        (["model.pt", "other.pt"], "unrecognized arguments: other.pt"),
        (["model.pt", "--precision", "int8"], "invalid choice: 'int8'"),
        (["model.pt", "--opset", "new"], "invalid int value: 'new'"),
        (["model.pt", "--input"], "expected one argument"),
        (["model.pt", "--input", "input:float32"], "not of the form"),
        (["model.pt", "--dim", "batch"], "NAME=MIN:MAX"),
        (["model.pt", "--dim", "bacth=1:4"], "no input has a dim of that name"),
        (["model.pt", "--recipe", "none.py"], "--recipe .*none.py: no such file"),
        (["model.pt", "--import", "none.py"], "--import .*none.py: no such file"),
        (["model.pt", "--import", "model.pt"], "not a Python file"),
        (["model.pt", "--allow-class", "os.system"], "never allowed"),
        (["missing.pt"], "missing.pt: no such file or directory"),
        (["empty.pt"], "empty.pt: the file is empty"),
        (["folder"], "folder: a directory without config.json"),
        (["lfs.pt"], "Git LFS pointer"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_and_usage_are_one_line_and_status_two(
    run: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], says: str
) -> None:
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "lfs.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert re.search(says, error_of(capsys, *argv))
    assert not list(tmp_path.glob("*.bundle"))


def test_an_output_that_cannot_be_written_is_found_before_any_work(
    run: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    assert "there is a file of that name" in error_of(capsys, "model.pt", "--out", "file", "--force")
    assert "cannot be written to" in error_of(capsys, "model.pt", "--out", "file/below")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("mine")
    assert "not a bundle" in error_of(capsys, "model.pt", "--out", "photos", "--force")
    (tmp_path / "done").mkdir()
    assert cli.main(["model.pt", "--out", "done"]) == 0
    capsys.readouterr()
    run.source = None
    assert "give --force (force=True) to replace it" in error_of(capsys, "model.pt", "--out", "done")
    assert run.source is None
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", read_only)
        assert "cannot be written to: Read-only file system" in error_of(capsys, "model.pt", "--out", "new")
    assert "the current folder is in it or is it" in error_of(capsys, "model.pt", "--out", ".")
    (tmp_path / "link").symlink_to("nowhere")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    (tmp_path / "volume").mkdir()
    assert "something is mounted there" in error_of(capsys, "model.pt", "--out", "volume")
    assert (tmp_path / "photos" / "me.jpg").read_text() == "mine"


def read_only(**options: Any) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["model.pt", "--opset", "17"], "--opset 17: PyTorch .* does not write it: give 18 to 23"),
        (["model.pt", "--opset", "99"], "--opset 99: PyTorch .* does not write it: give 18 to 23"),
        (["script.pt", "--opset", "12"], "--opset 12: TorchScript can be written as 13 and newer"),
        (["model.onnx", "--opset", "20"], "--opset 20: an ONNX file keeps its own opset: drop --opset"),
        (["model.onnx", "--precision", "fp16"], "--precision fp16: an ONNX file has its dtypes built in"),
        (["script.pt", "--precision", "bf16"], "--precision bf16: TorchScript has its dtypes built in"),
    ],
)
def test_what_a_file_cannot_become_is_found_before_it_is_loaded(
    run: Recorder,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: Any,
    says: str,
) -> None:
    torch.jit.script(nn.RMSNorm(8)).save(tmp_path / "script.pt")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a")
    monkeypatch.setattr("rmsnorm_deploy.load.load_source", None)
    assert re.search(says, error_of(capsys, *argv))
    assert not list(tmp_path.glob("*.bundle"))


@pytest.mark.parametrize(
    ("model", "bundle"),
    [("a/block.pt", "block.bundle"), ("net.v2.safetensors", "net.v2.bundle"), ("/x/llama-1.5b/", "llama-1.5b.bundle")],
)
def test_the_bundle_is_named_after_the_model(tmp_path: Path, model: str, bundle: str) -> None:
    path = tmp_path / model.lstrip("/")
    if model.endswith("/"):
        path.mkdir(parents=True)
    assert cli.default_out(path) == Path(bundle)


def test_a_fault_of_ours_is_one_line_and_status_seventy_and_debug_shows_where(
    run: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.error = KeyError("deep\ninside")
    message = error_of(capsys, "model.pt", status=70)
    assert message.startswith("error: internal fault, KeyError: ")
    assert "run again with --debug" in message
    assert cli.main(["model.pt", "--debug", "--force"]) == 70
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_an_interrupt_is_no_traceback(run: Recorder, capsys: pytest.CaptureFixture[str]) -> None:
    run.error = KeyboardInterrupt()
    assert "interrupted" in error_of(capsys, "model.pt", status=130)


def command(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "rmsnorm_deploy.export", *argv], cwd=cwd, env=environment, capture_output=True, text=True
    )


def test_the_command_itself_ends_with_the_right_status(tmp_path: Path) -> None:
    wrong = command("missing.pt", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", "error: missing.pt: no such file or directory\n")
    shown = command("--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert all(option in shown.stdout for option in ("--recipe", "--allow-class", "--targets", "exit status"))
    assert command("--version", cwd=tmp_path).stdout.startswith("rmsnorm_deploy ")


# ---- what all commands share

COMMANDS = {
    "": "__main__", "export": "export.cli", "inspect": "inspect.cli", "verify": "verify", "parity": "parity.__main__",
    "benchmark": "benchmark.__main__", "benchmark fusion": "benchmark.fusion", "benchmark kernels": "benchmark.kernels",
    "benchmark overhead": "benchmark.overhead", "benchmark tokens": "benchmark.tokens", "engine": "engine.cli",
    "engine.triton": "engine.triton", "native": "native", "doctor": "doctor",
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_one_line_for_an_error_one_help_and_one_version(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"rmsnorm_deploy.{COMMANDS[name]}").main
    prog = f"python -m rmsnorm_deploy{'.' if name else ''}{name}"
    assert main(["--no-such-option"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: .*; see {re.escape(prog)} --help\n", err)
    assert main(["--no-such-option", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err
    for option, says in (("--version", rmsnorm_deploy.__version__), ("--help", "")):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert says in shown
    assert shown.startswith(f"usage: {prog}")
    assert re.search(
        r"exit status:\n +0  .*\n(.*\n)* +2  bad input or usage\n(.*\n)* +70  .*\n"
        r" +130  interrupted\n +143  terminated",
        shown,
    )
    assert shown.index("as in every command:") < shown.index("exit status:")


def test_the_package_itself_runs_the_command_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    from rmsnorm_deploy.__main__ import main

    assert main(["verify", "nowhere"]) == 2
    assert capsys.readouterr().err == "error: nowhere is not a bundle: it has no manifest.json\n"
    assert main(["exprot"]) == 2
    assert "exprot: no such command; there is export, inspect" in capsys.readouterr().err
    assert main([]) == 0
    assert "python -m rmsnorm_deploy.doctor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("import sys; sys.exit(3)", "loud.py: importing it failed with SystemExit: 3"),
        ("def build(): raise SystemExit(4)", "loud.py: build() failed with SystemExit: 4"),
    ],
)
def test_a_recipe_that_exits_does_not_end_the_command_in_silence(
    run: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path, recipe: str, says: str
) -> None:
    (tmp_path / "loud.py").write_text(recipe)
    assert error_of(capsys, "loud.py") == f"error: {says}"


def test_what_a_recipe_prints_is_kept_out_of_the_json(
    run: Recorder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = "from torch import nn\nprint('imported')\ndef build():\n    print('built')\n    return nn.RMSNorm(8)\n"
    (tmp_path / "talkative.py").write_text(text)
    assert cli.main(["talkative.py", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["bundle"] == "talkative.bundle"
    assert err == "imported\nbuilt\n"


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (PermissionError(13, "Permission denied", "/x/model.pt"), 2, "error: /x/model.pt: Permission denied"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (MemoryError("5 TiB for x"), 2, "error: not enough memory: 5 TiB for x: smaller sizes in the file or in --dim"),
        (ZeroDivisionError("a\nb"), 70, "error: internal fault, ZeroDivisionError: a b; run again with --debug"),
    ],
)
def test_what_the_system_says_is_one_line_with_its_file(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, says: str
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    assert run_command([], fail) == status
    err = capsys.readouterr().err
    assert err.startswith(says)
    assert err.count("\n") == 1


def test_a_terminated_command_cleans_up_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    def wait(argv: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert run_command([], wait) == 143
    assert cleaned
    assert capsys.readouterr().err == "error: terminated\n"
    assert signal.getsignal(signal.SIGTERM) == before
