"""What becomes of the engines that were built: timed where they can run, and in the bundle's report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from rmsnorm_deploy.bundle import Bundle
from rmsnorm_deploy.engine.request import write_json
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.runtime.engines import EngineRecord

Say = Callable[[str], None]


def keep_faster(bundle: Bundle, records: list[EngineRecord], tell: Say) -> list[EngineRecord]:
    """Time the engines where they can run; of several, the faster is kept. Else all are kept, marked untimed."""
    from rmsnorm_deploy.engine.timing import runs_here, time_engines

    if not runs_here(records):
        tell("no GPU here runs these engines: all are kept, untimed")
        return records
    times = time_engines(bundle, records)
    timed = [replace(record, milliseconds=times[record.name], milliseconds_of_all=times) for record in records]
    for record in timed:
        path = record.path.with_suffix(".json")
        data = json.loads(path.read_text(encoding="utf-8"))
        write_json(path, data | {"milliseconds": record.milliseconds, "milliseconds_of_all": times})
        tell(f"{record.name}: {record.milliseconds:.4f} ms")
    timed.sort(key=lambda record: record.milliseconds or 0.0)
    for slower in timed[1:]:
        slower.path.unlink()
        slower.path.with_suffix(".json").unlink()
        tell(f"{slower.name} is slower, and removed")
    return timed[:1]


def report_engines(bundle: Bundle, tell: Say) -> None:
    """Write the engines and their times into the bundle's report, where it has one."""
    from rmsnorm_deploy.report.html import rewrite_html

    if not (bundle.path / "report.html").is_file():
        return
    try:
        rewrite_html(bundle)
    except InputError as error:  # the engines are built and right, whatever the evidence of an older version says
        tell(f"warning: report.html is left as it was: {error}")
