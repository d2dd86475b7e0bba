"""The report: the verdict first, nothing left out, nothing fetched, and no markup out of a model's own names."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_fakes import FakeBundle, TokenModel, make_bundle
from rich.console import Console

from rmsnorm_deploy.benchmark.model import compare
from rmsnorm_deploy.benchmark.result import BenchmarkReport, Timing, milliseconds
from rmsnorm_deploy.errors import InputError
from rmsnorm_deploy.parity import ParityReport, run_parity
from rmsnorm_deploy.parity.norm_result import RULES
from rmsnorm_deploy.parity.result import VERDICTS
from rmsnorm_deploy.parity.ulp import UlpError
from rmsnorm_deploy.report import print_summary, view, write_html
from rmsnorm_deploy.report.plots import error_plot, speed_plot

HERE = ["pytorch", "onnxruntime", "onnxruntime-unoptimized"]
VOID = {"meta", "br", "link", "img", "input", "hr"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> FakeBundle:
    torch.manual_seed(0)
    made = make_bundle(
        tmp_path_factory.mktemp("r") / "tiny", TokenModel(), (torch.randint(0, 50, (2, 7)),),
        dims={"batch": (0,), "seq": (1,)}, high=50,
    )  # fmt: skip
    made.manifest["left"] = [
        {"name": "stats", "node": "node_Div_7", "reason": "the mean is over 8 of 32 columns", "location": None},
        {"name": "", "node": "node_Div_9", "reason": "differs on <zero> rows", "location": None},
    ]
    return made


@pytest.fixture(scope="module")
def parity(bundle: FakeBundle) -> ParityReport:
    return run_parity(bundle, backends=HERE)


@pytest.fixture(scope="module")
def failing(parity: ParityReport) -> ParityReport:
    backends = [replace(b, verdict="fail") if b.name.startswith("onnx") else b for b in parity.backends]
    absent = replace(
        parity.backends[0], name="tensorrt", title="TensorRT", verdict="not-run", reason="no GPU", error=None
    )
    return replace(parity, backends=[*backends, absent])


@pytest.fixture(scope="module")
def benchmark() -> BenchmarkReport:
    timings = [
        Timing("pytorch", "PyTorch", "model", "pytorch", [2.0, 2.1, 2.2] * 5),
        Timing("pytorch-layernorm", "PyTorch with LayerNorm", "model", "pytorch", reason="no module"),
        Timing("onnxruntime-unfused", "ONNX Runtime, norms not fused", "model", "onnxruntime", [1.5, 1.6, 1.4] * 5),
        Timing("onnxruntime", "ONNX Runtime", "model", "onnxruntime", [1.0, 1.1, 0.9] * 5),
        Timing("norm-copy", "Copy of the same bytes", "norm", "pytorch", [0.002] * 15),
        Timing("norm-onnxruntime", "ONNX Runtime RMSNorm", "norm", "onnxruntime", [0.01, 0.011, 0.012] * 5),
    ]
    return BenchmarkReport(
        timings=timings,
        comparisons=compare(timings),
        threads=2,
        machine={"processor": "A <fast> one", "cores": 8, "system": "Linux", "load": 0.2},
        shapes={"ids": [2, 7], "step": []},
        norm={"rows": 14, "row": [32], "dtype": "float32"},
        exchanged={"onnxruntime": 4},
    )


class Page(HTMLParser):
    """Collects what a check asks about a page, and fails on tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(path: Path, bundle: FakeBundle, parity: Any, benchmark: Any) -> tuple[str, Page]:
    write_html(bundle, parity, benchmark, path / "report.html")
    text = (path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_one_small_file_that_fetches_nothing(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, benchmark: BenchmarkReport
) -> None:
    text, found = page(tmp_path, bundle, parity, benchmark)
    assert len(text.encode()) < 1_000_000
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.seen}
    for _, attributes in found.seen:
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            assert (attributes.get(name) or "#").startswith("#")
    assert not re.search(r"@import|url\((?!#)|<metadata|dc:", text)


def test_the_verdict_comes_first_in_words(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, failing: ParityReport
) -> None:
    text, found = page(tmp_path, bundle, parity, None)
    assert text.index("The same model</h1>") < text.index("<h2")
    assert "ONNX Runtime and ONNX Runtime (optimizer off) agree with it on 6 inputs against float64" in found.text
    text, found = page(tmp_path, bundle, failing, None)
    assert text.index("Not the same model</h1>") < text.index("<h2")
    assert "✗ fail" in re.sub(r"\s+", " ", found.text)
    assert "Not run here: TensorRT" in found.text
    assert "no GPU" in found.text
    _, found = page(tmp_path, bundle, None, None)
    assert "Not checked" in found.text
    assert "Timing was left out" in found.text
    _, found = page(tmp_path, bundle, replace(parity, problem="the oracle does not run"), None)
    assert "Not proved" in found.text


def test_everything_is_in_it(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, benchmark: BenchmarkReport
) -> None:
    text, found = page(tmp_path, bundle, parity, benchmark)
    for norm in bundle.manifest["norms"]:
        assert norm["name"] in found.text
    for expected in (
        "the mean is over 8 of 32 columns", "differs on <zero> rows", "Budget for float32", "A <fast> one", "no module",
        "4 of the 5 norms could be exchanged", "Norms fused (model, ONNX Runtime)", f"torch {torch.__version__}",
        f"python -m rmsnorm_deploy.parity {bundle.path.name} --seed 0", "edge ids", "one id throughout",
        bundle.manifest["files"]["model.onnx"]["sha256"], "14 rows of 32, float32",
    ):  # fmt: skip
        assert expected in found.text, expected
    assert text.count("<svg ") == 6


def test_a_reader_of_any_kind_finds_the_way(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, benchmark: BenchmarkReport
) -> None:
    text, found = page(tmp_path, bundle, parity, benchmark)
    tags = [tag for tag, _ in found.seen]
    assert tags.count("h1") == 1
    assert dict(found.seen[1][1]) == {"lang": "en"} or any(a.get("lang") == "en" for _, a in found.seen)
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert all(later <= earlier + 1 for earlier, later in pairwise(levels))
    images = [attributes for _, attributes in found.seen if attributes.get("role") == "img"]
    assert len(images) == 3
    assert all(len(attributes["aria-label"]) > 30 for attributes in images)
    assert all(attributes.get("scope") for tag, attributes in found.seen if tag == "th")
    ids = [attributes["id"] for _, attributes in found.seen if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert {a["aria-labelledby"] for _, a in found.seen if "aria-labelledby" in a} <= set(ids)
    assert "prefers-color-scheme: dark" in text
    assert "max-width: 36rem" in text


def test_names_from_the_model_stay_text(tmp_path: Path, bundle: FakeBundle, parity: ParityReport) -> None:
    evil = "<script>alert(1)</script>$\\frac{1}{0}$"
    norms = [{**norm, "name": evil, "scale": evil} for norm in bundle.manifest["norms"]]
    spoilt = replace(
        bundle, manifest={**bundle.manifest, "norms": norms, "left": [{"name": evil, "node": "", "reason": evil}]}
    )
    named = replace(parity, backends=[replace(backend, title=evil) for backend in parity.backends])
    _, found = page(tmp_path, spoilt, named, None)
    assert "script" not in {tag for tag, _ in found.seen}
    assert evil in found.text


def test_a_thousand_norms_still_make_a_small_file(tmp_path: Path, bundle: FakeBundle, parity: ParityReport) -> None:
    manifest = {**bundle.manifest, "norms": bundle.manifest["norms"] * 500, "left": bundle.manifest["left"] * 500}
    text, found = page(tmp_path, replace(bundle, manifest=manifest), parity, None)
    assert len(text.encode()) < 1_000_000
    assert "2000 more are in manifest.json" in found.text
    assert "500 more are in manifest.json" in found.text


def test_colours_follow_the_theme(parity: ParityReport, benchmark: BenchmarkReport) -> None:
    plots = [
        error_plot(parity.backends, 20.0, "wide"),
        speed_plot([t for t in benchmark.timings if t.milliseconds], "narrow", "s"),
    ]
    for text in plots:
        assert "var(--ink)" in text
        assert "var(--series-1)" in text
        assert not re.search(r"#[0-9a-fA-F]{6}", text)
        assert "DejaVu" not in text
        assert not re.search(r"<text style=\"(?![^\"]*fill: var)", text)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_text_has_contrast_in_light_and_dark() -> None:
    css = (Path(view.__file__).parent / "style.css").read_text(encoding="utf-8")
    light, dark = re.split(r"@media \(prefers-color-scheme: dark\)", css)[:2]
    for theme in (light, dark):
        colour = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", theme))
        for name in ("ink", "soft"):
            assert contrast(colour[name], colour["page"]) >= 4.5
            assert contrast(colour[name], colour["card"]) >= 4.5
        for name in ("pass", "fail", "unknown"):
            assert contrast(colour[name], colour[f"{name}-page"]) >= 4.5
            assert contrast(colour["ink"], colour[f"{name}-page"]) >= 4.5
        for number in range(1, 7):
            assert contrast(colour[f"series-{number}"], colour["card"]) >= 3


def test_a_verdict_beside_the_unfused_model_shows_both_figures(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport
) -> None:
    unfused = UlpError(384.4, 194, 13.62, 100)
    backends = [
        replace(backend, verdict="pass-as-exact-as-unfused", unfused=unfused)
        if backend.name == "onnxruntime"
        else backend
        for backend in parity.backends
    ]
    found, _ = page(tmp_path, bundle, replace(parity, backends=backends), None)
    assert "pass, as exact as unfused" in found
    assert "unfused: 384 ULP at most, 13.6 on average" in found
    assert "ONNX Runtime: unfused: 384 ULP at most" in printed(bundle, replace(parity, backends=backends), None)


def test_the_model_before_export_is_not_said_to_be_as_exact_as_itself(parity: ParityReport) -> None:
    eager = replace(parity.backend("pytorch"), verdict="pass-better-than-eager")
    assert view.words(eager, parity) == "the model before export"
    assert view.words(replace(eager, title="ONNX Runtime"), parity) == "pass, as exact as eager"


def test_no_gain_is_clear_on_a_busy_machine(tmp_path: Path, bundle: FakeBundle, benchmark: BenchmarkReport) -> None:
    idle = replace(benchmark, machine={**benchmark.machine, "load": 0.0, "cores": 2})
    busy = replace(benchmark, machine={**benchmark.machine, "load": 9.0, "cores": 2})
    clear = '<td data-label="Clear">yes</td>'
    assert clear in page(tmp_path, bundle, None, idle)[0]
    found, _ = page(tmp_path, bundle, None, busy)
    assert clear not in found
    assert "no, busy" in found


def test_json_gives_the_same_report(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, benchmark: BenchmarkReport
) -> None:
    direct, _ = page(tmp_path, bundle, parity, benchmark)
    stored, _ = page(
        tmp_path, bundle, json.loads(json.dumps(parity.to_json())), json.loads(json.dumps(benchmark.to_json()))
    )
    assert stored == direct


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, bundle: FakeBundle) -> None:
    with pytest.raises(InputError, match="cannot write"):
        write_html(bundle, None, None, tmp_path / "none" / "report.html")


def printed(bundle: FakeBundle, parity: Any, benchmark: Any) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_summary(bundle, parity, benchmark, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_terminal_summary_fits_and_says_it_all(
    bundle: FakeBundle, parity: ParityReport, benchmark: BenchmarkReport
) -> None:
    text = printed(bundle, parity.to_json(), benchmark.to_json())
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(len(line) for line in lines if not line.startswith("Files in")) <= 80  # a path is not broken
    assert len(lines) < 50
    assert lines[1] == "✓ The same model"
    for expected in ("Norms", "RMSNorm", "left stats: the mean is over 8 of 32 columns", "✓ pass", "budget for float32",
                     "Norms fused (model, ONNX Runtime)", "1.50", "Files in", "with the fused ops"):  # fmt: skip
        assert expected in text, expected


def test_the_terminal_says_where_a_backend_is_worst(bundle: FakeBundle, failing: ParityReport) -> None:
    text = printed(bundle, failing, None)
    assert "✗ Not the same model" in text
    assert "ONNX Runtime: worst on" in text
    assert "not run here: TensorRT" in text
    assert "Speed" not in text


def test_many_look_alikes_are_counted(bundle: FakeBundle) -> None:
    many = replace(bundle, manifest={**bundle.manifest, "left": bundle.manifest["left"] * 10, "norms": []})
    text = printed(many, None, None)
    assert "and 15 more look-alikes were left" in text
    assert "? Not checked" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.0, "1.23 s"), (999.7, "1 s"), (999.4, "999 ms"), (1.0, "1 ms"), (0.0123, "12.3 µs"), (0.9999, "1 ms")],
)
def test_times_have_the_unit_that_suits(value: float, text: str) -> None:
    assert milliseconds(value) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (None, ""), (0.5, "2.0x more exact"), (0.0001, "far more exact"), (1.05, "alike"), (1.5, "1.5x less exact"),
        (480.2, "480x less exact"),
    ],
)  # fmt: skip
def test_the_comparison_with_eager_is_in_words(parity: ParityReport, ratio: float | None, text: str) -> None:
    assert view.ratio_text(replace(parity.backend("onnxruntime"), versus_eager=ratio), parity) == text


@pytest.mark.parametrize(
    ("baseline", "word"), [("PyTorch eager", "eager"), ("reference.onnx in ONNX Runtime", "unfused"), (None, "")]
)
def test_what_did_not_run_is_not_what_a_backend_is_compared_with(
    tmp_path: Path, bundle: FakeBundle, parity: ParityReport, baseline: str | None, word: str
) -> None:
    """The worst input's figures stand beside a ratio of the median input's, which the heading has to say."""
    like = [replace(parity.backend("onnxruntime"), verdict="pass-better-than-eager", versus_eager=1.2)]
    told = replace(parity, baseline=baseline, backends=like)
    texts = [printed(bundle, told, None), re.sub(r"<[^>]+>", " ", page(tmp_path, bundle, told, None)[0])]
    for text, heading in zip(texts, ("median beside", "Median input, beside"), strict=True):
        assert ("1.2x less exact" in text) == bool(word)
        for other in ("eager", "unfused"):
            assert (f"{heading} {other}" in text) == (other == word)
    if word:
        assert f"as exact as {word}" in texts[1]


# --- the words for a verdict

ROOT = Path(__file__).parent.parent


def rule_ids(text: str) -> set[str]:
    """Ids of verdicts and rules, as far as they can be told from other words."""
    return set(re.findall(r"(?<![\w.-])(?:pass-[a-z-]*[a-z]|not-run|norm-[a-z-]*[a-z])", text))


def test_the_docs_name_every_rule_that_there_is_and_no_other() -> None:
    known = {*VERDICTS, *RULES}
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?m)^\| Rule id .*\n\|[-| ]+\|\n((?:\|.*\n)+)", page)
    told = {name for table in tables for name in re.findall(r"(?m)^\| `([^`]+)`", table)}
    assert told - {"norm-..."} == known
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        assert rule_ids(path.read_text(encoding="utf-8")) <= known, path
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"*{verdict}*" in readme for verdict in VERDICTS)


def test_the_report_has_a_symbol_and_words_for_every_verdict() -> None:
    assert set(view.SYMBOLS) == set(view.WORDS) == set(VERDICTS)
