"""The child process that builds one engine: whatever ends it is an error message in the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rmsnorm_deploy.engine.request import BuildAnswer, BuildRequest
from rmsnorm_deploy.errors import BackendUnavailable, InputError

OUR_MARK = "rmsnorm_deploy: "  # what the plugin's own messages begin with


def run_worker(request: BuildRequest, scratch: Path) -> BuildAnswer:
    """Have the engine built; the answer is of one that was.

    Raises:
        InputError: TensorRT refused, or ended the process.
        BackendUnavailable: TensorRT cannot build here.
    """
    asked = scratch / "request.json"
    request.write(asked)
    command = [sys.executable, "-m", "rmsnorm_deploy.engine.worker", str(asked)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    status, said = echoed(command, os.environ | {"PYTHONPATH": path})
    answered = Path(request.answer)
    if not answered.is_file():
        last = f": {said[-1]}" if said else ""
        raise InputError(f"{request.runtime} {_ending(status)} while it built {request.model}{last}"[:600])
    answer = BuildAnswer.read(answered)
    if answer.error is not None:
        # The plugin says what it refuses on standard error, where TensorRT gives it no logger.
        ours = [line for line in said if line.startswith(OUR_MARK) and line not in answer.error]
        error = f"{answer.error}: {ours[0].removeprefix(OUR_MARK)}" if ours else answer.error
        raise (BackendUnavailable if answer.kind == "backend" else InputError)(error)
    return answer


def echoed(command: Sequence[str], environment: dict[str, str]) -> tuple[int, list[str]]:
    """Run a command, pass on what it says on standard error as it comes, and return its status and those lines."""
    said = b""
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stderr is not None
        try:
            while chunk := process.stderr.read(4096):
                said = (said + chunk)[-65536:]
                sys.stderr.write(chunk.decode("utf-8", "replace"))
                sys.stderr.flush()
        except BaseException:  # interrupted: it must not go on alone for minutes
            process.kill()
            raise
    return process.returncode, [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]


def _ending(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
