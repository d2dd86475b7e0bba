"""Check that every file of a bundle is the one that was exported, and that the model is still right."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rmsnorm_deploy.bundle import MANIFEST, SUMS, UNHASHED
from rmsnorm_deploy.cli import Parser, run_command
from rmsnorm_deploy.errors import EXIT_OK, EXIT_PARITY, InputError

ENGINES = "engines"  # built after the export, each engine with a description of its own that has its hash

_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileProblem:
    """One file that is not as exported: ``problem`` is "missing", "altered", "extra" or "contradicted"."""

    name: str
    problem: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name} is {self.problem}: {self.detail}"


def check_files(path: Path, progress: Callable[[str], None] | None = None) -> list[FileProblem]:
    """Compare the files in bundle ``path`` with the hashes they had when it was exported.

    The manifest has those of the model's files, SHA256SUMS those of the manifest and the evidence too, each engine's
    description that of the engine. The first bundles of format 1 have no SHA256SUMS.

    Raises:
        InputError: ``path`` is not a bundle, or names a file outside it.
    """
    manifest = _manifest(path)
    files = _recorded(path, manifest)
    sums, problems = _sums(path, manifest)
    for name, record in {**{name: {"sha256": digest} for name, digest in sums.items()}, **files}.items():
        if progress is not None:
            progress(f"hashing {name}")
        problems += _compare(path / name, name, record["sha256"], record.get("bytes"))
    problems += _engine_problems(path)
    known = {*(sums if sums else UNHASHED), SUMS, *files, *_engine_files(path)}
    for name in _present(path):
        if name not in known:
            problems.append(FileProblem(name, "extra", "the export did not write it; remove it"))
    return problems


def check_norms(path: Path) -> list[FileProblem]:
    """What the manifest of bundle ``path`` says of norms and look-alikes that its model.onnx contradicts.

    Raises:
        InputError: ``path`` is not a bundle, or model.onnx can't be read.
    """
    from rmsnorm_deploy.bundle import open_bundle
    from rmsnorm_deploy.inspect.agree import differences, norms_of_file

    bundle = open_bundle(path)
    return [
        FileProblem(MANIFEST, "contradicted", text)
        for text in differences(bundle.norms, bundle.left, *norms_of_file(bundle.model_path))
    ]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} is not a bundle: it has no {MANIFEST}") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{path / MANIFEST} is not a bundle's: {error}") from error
    if not isinstance(manifest, dict):
        raise InputError(f"{path / MANIFEST} is not a bundle's: it holds no object")
    return manifest


def _recorded(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    try:
        files = {str(name): dict(record) for name, record in manifest["files"].items()}
        for record in files.values():
            _ = record["sha256"], int(record["bytes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path / MANIFEST} is not a bundle's: {error}") from error
    _refuse_outside(path / MANIFEST, files)
    return files


def _sums(path: Path, manifest: Mapping[str, Any]) -> tuple[dict[str, str], list[FileProblem]]:
    """The hashes in SHA256SUMS by name, and what is wrong with that file itself; none of either in an old bundle."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
        sums = {name: digest for digest, name in (line.split("  ", 1) for line in lines)}
    except FileNotFoundError:
        missing = FileProblem(SUMS, "missing", "the manifest names it")
        return {}, [missing] if manifest.get("sums") is not None else []
    except (OSError, ValueError):
        return {}, [FileProblem(SUMS, "altered", "not in the form that sha256sum reads")]
    _refuse_outside(path / SUMS, sums)
    return sums, []


def _refuse_outside(source: Path, names: Iterable[str]) -> None:
    for name in names:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in name:
            raise InputError(f"{source} names {name!r}, outside the bundle")


def _compare(file: Path, name: str, sha256: str, size: int | None) -> list[FileProblem]:
    if file.is_symlink() or not file.is_file():
        detail = "a link stands in its place" if file.is_symlink() else "the export wrote it"
        return [FileProblem(name, "altered" if file.is_symlink() else "missing", detail)]
    found = file.stat().st_size
    if size is not None and found != size:
        return [FileProblem(name, "altered", f"it has {found} bytes, {size} when exported")]
    if _sha256(file) != sha256:
        return [FileProblem(name, "altered", "its sha256 is not the one it had when exported")]
    return []


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _present(path: Path) -> Iterator[str]:
    for file in sorted(path.rglob("*")):
        if file.is_symlink() or not file.is_dir():
            yield file.relative_to(path).as_posix()


def _descriptions(path: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for file in sorted((path / ENGINES).glob("*.json")):
        try:
            description = json.loads(file.read_text(encoding="utf-8"))
            _ = str(description["engine"]), str(description["sha256"])
        except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} does not describe an engine: {error}") from error
        yield file, description


def _engine_files(path: Path) -> Iterator[str]:
    for file, description in _descriptions(path):
        yield f"{ENGINES}/{file.name}"
        yield f"{ENGINES}/{description['engine']}"


def _engine_problems(path: Path) -> Iterator[FileProblem]:
    for _, description in _descriptions(path):
        name = f"{ENGINES}/{description['engine']}"
        file = path / name
        if not file.is_file():
            yield FileProblem(name, "missing", "its description is there")
        elif _sha256(file) != description["sha256"]:
            yield FileProblem(name, "altered", "its sha256 is not the one in its description")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_command(argv, lambda arguments: _run(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser(
        "python -m rmsnorm_deploy.verify",
        __doc__,
        statuses={
            EXIT_OK: "as exported",
            EXIT_PARITY: "a file is altered, missing, extra or contradicted, or parity failed",
        },
    )
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that the export left")
    parser.add_argument("--files-only", action="store_true", help="check files and manifest, and run nothing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs that parity makes up (0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(options: argparse.Namespace) -> int:
    from rmsnorm_deploy.parity.progress import Progress

    with Progress() as progress:
        problems = check_files(options.bundle, progress)
        # a model that is not the one exported is not looked into or run: it may come from anyone
        problems = problems or check_norms(options.bundle)
        parity = None if problems or options.files_only else _parity(options, progress)
    if options.json:
        report = {
            "files": [asdict(problem) for problem in problems],
            "parity": parity.to_json() if parity is not None else None,
        }
        print(json.dumps(report, indent=1))
    else:
        lines = [str(problem) for problem in problems] or [_good(options.bundle)]
        lines += _not_judged(options, problems) + (parity.summary() if parity is not None else [])
        print("\n".join(lines))
    return EXIT_PARITY if problems or (parity is not None and not parity.ok) else EXIT_OK


def _not_judged(options: argparse.Namespace, problems: Sequence[FileProblem]) -> list[str]:
    if options.files_only or not problems:
        return []
    command = shlex.join(["python", "-m", "rmsnorm_deploy.parity", str(options.bundle), "--bisect"])
    return [f"parity was not judged: where you trust the files as they are, {command} runs them and names the norms"]


def _good(path: Path) -> str:
    if (path / SUMS).is_file():
        return "every file is as exported, and the manifest tells the norms that model.onnx has"
    return "every file of the model is as exported; manifest and evidence have no hashes: an older version wrote them"


def _parity(options: argparse.Namespace, progress: Callable[[str], None]) -> Any:
    from rmsnorm_deploy.bundle import open_bundle
    from rmsnorm_deploy.parity.run import run_parity

    return run_parity(open_bundle(options.bundle), seed=options.seed, progress=progress)


if __name__ == "__main__":
    sys.exit(main())
