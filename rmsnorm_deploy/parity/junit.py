"""A parity report as JUnit XML: a suite a backend, a case an output of a sample."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity.result import FAIL, NOT_RUN, BackendResult, Measurement, ParityReport


def write_junit(report: ParityReport, path: Path) -> None:
    """Write ``report`` to ``path``. Raises InputError when that cannot be written."""
    root = ElementTree.Element("testsuites", name="rmsnorm_deploy.parity")
    if report.problem is not None:
        _error_suite(root, report.problem)
    for backend in report.backends:
        cases = [item for item in report.measurements if item.backend == backend.name]
        _suite(root, backend, cases, report.baseline or "")
    ElementTree.indent(root)
    try:
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def require_writable(path: Path) -> None:
    """Raise InputError where a report can surely not be written to ``path``; nothing is written."""
    folder = path.parent
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder")
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"cannot write {path}: you may not write there")


def _error_suite(root: ElementTree.Element, problem: str) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name="oracle", tests="1", errors="1")
    case = ElementTree.SubElement(suite, "testcase", classname="oracle", name="float64 truth")
    ElementTree.SubElement(case, "error", message=problem)


def _suite(root: ElementTree.Element, backend: BackendResult, cases: list[Measurement], baseline: str) -> None:
    failures = sum(case.verdict == FAIL for case in cases)
    skipped = sum(case.verdict == NOT_RUN for case in cases)
    if not cases:
        failures, skipped = int(backend.verdict == FAIL), int(backend.verdict == NOT_RUN)
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=backend.name,
        tests=str(max(len(cases), 1)),
        failures=str(failures),
        skipped=str(skipped),
        time=f"{backend.seconds:.3f}",
    )
    if not cases:
        _case(suite, backend.name, "opens", backend.verdict, backend.reason or "")
    for case in cases:
        name = f"{case.sample}: {case.output}" if case.output else case.sample
        _case(suite, backend.name, name, case.verdict, case.reason or _figures(case, baseline))


def _case(suite: ElementTree.Element, backend: str, name: str, verdict: str, message: str) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=backend, name=name)
    if verdict == FAIL:
        ElementTree.SubElement(case, "failure", message=message, type=verdict)
    elif verdict == NOT_RUN:
        ElementTree.SubElement(case, "skipped", message=message)


def _figures(case: Measurement, baseline: str) -> str:
    if case.error is None:
        return ""
    error, eager = case.error, case.eager
    beside = f"; {baseline}: max {eager.max:.4g}, mean {eager.mean:.4g}" if eager else ""
    where = f"at {list(error.worst)} got {error.got:.9g}, expected {error.want:.9g}"
    wrong = f", {error.mismatched} NaN or infinity out of place" if error.mismatched else ""
    return f"max {error.max:.4g}, mean {error.mean:.4g} ULP of {case.dtype}{wrong}{beside}; {where}"
