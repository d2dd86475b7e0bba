"""Builds a bundle's engines, each in a child process, and writes what the runtime needs to know beside them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_changes
from pathlib import Path

from rmsnorm_deploy.bundle import Bundle, open_bundle, sha256
from rmsnorm_deploy.engine.child import run_worker
from rmsnorm_deploy.engine.keep import Say, keep_faster, report_engines
from rmsnorm_deploy.engine.precision import check_precision
from rmsnorm_deploy.engine.profiles import default_profile, describe, limits, parse_profile
from rmsnorm_deploy.engine.request import MODULES, BuildAnswer, BuildRequest, partial, write_json
from rmsnorm_deploy.errors import BackendUnavailable, InputError
from rmsnorm_deploy.runtime.engines import EngineRecord, as_metadata, check_dtypes, model_identity
from rmsnorm_deploy.runtime.optional import load_module, native_library
from rmsnorm_deploy.runtime.profiles import Profile
from rmsnorm_deploy.runtime.signature import Signature
from rmsnorm_deploy.runtime.trust import remember

VARIANTS = {"auto": ("plugin", "native"), "always": ("plugin",), "never": ("native",)}


@dataclass(frozen=True)
class EngineOptions:
    """What to build.

    runtime: "tensorrt" or "tensorrt-rtx".
    sms: compute capabilities such as 89, for TensorRT-RTX, which needs no GPU; () is the GPU that is here.
    profiles: as ``--profile`` takes them; () is one made from the manifest's dims.
    precision: "keep", or the bundle's own; every other is refused, with the command that makes such a bundle.
    plugin: "auto" builds with and without and keeps the faster where a GPU can tell, "always", "never".
    plugin_library: None takes the built one.
    timing_cache: a file that is read where it is there, and written.
    verbose: print everything that TensorRT says.
    """

    runtime: str = "tensorrt"
    sms: tuple[int, ...] = ()
    profiles: tuple[str, ...] = ()
    precision: str = "keep"
    plugin: str = "auto"
    plugin_library: Path | None = None
    timing_cache: Path | None = None
    verbose: bool = False


def build_engines(
    bundle: Bundle | str | os.PathLike[str], options: EngineOptions | None = None, say: Say | None = None
) -> list[EngineRecord]:
    """Build the engines of a bundle into ``BUNDLE/engines`` and return what was built, the fastest first.

    Raises:
        InputError: a model, profile or library that TensorRT refuses.
        BackendUnavailable: TensorRT, the plugin library, or a GPU that it needs is not here.
    """
    opened = bundle if isinstance(bundle, Bundle) else open_bundle(bundle)
    chosen = options or EngineOptions()
    tell: Say = say or (lambda text: None)
    if chosen.runtime not in MODULES:
        raise InputError(f"no runtime {chosen.runtime!r}: choose {' or '.join(MODULES)}")
    if chosen.timing_cache is not None and chosen.runtime == "tensorrt-rtx":
        raise InputError("TensorRT-RTX keeps no timing cache: leave --timing-cache out")
    if chosen.plugin not in VARIANTS:
        raise InputError(f"plugin is {chosen.plugin!r}: choose {', '.join(VARIANTS)}")
    precision = check_precision(opened, chosen.precision)
    check_dtypes(Signature.from_manifest(opened.manifest), chosen.runtime)
    load_module(*MODULES[chosen.runtime])
    chosen = with_changes(chosen, sms=_sms(chosen), precision=precision)
    profiles = [parse_profile(text, opened.manifest) for text in chosen.profiles]
    given, profiles = bool(profiles), profiles or [default_profile(opened.manifest)]
    for profile in profiles:
        tell(f"profile {describe(profile)}{'' if given else limits(profile)}")
    variants = _variants(opened, chosen, tell)
    records = [_build(opened, chosen, profiles, variant, variants, tell) for variant in variants]
    kept = keep_faster(opened, records, tell)
    report_engines(opened, tell)
    return kept


def _sms(options: EngineOptions) -> tuple[int, ...]:
    from rmsnorm_deploy.runtime.cuda import CudaDevice, no_gpu_reason

    if options.runtime == "tensorrt-rtx" and options.sms:
        return options.sms
    reason = no_gpu_reason()
    if reason is not None:
        cure = "; give --sm 80,86,89,120 to build without one" if options.runtime == "tensorrt-rtx" else ""
        raise BackendUnavailable(f"{options.runtime} builds for the GPU that is here, and {reason}{cure}")
    here = CudaDevice().sm
    if options.sms and options.sms != (here,):
        raise InputError(f"tensorrt builds for the GPU that is here, SM {here}: leave --sm out")
    return (here,)


def _variants(bundle: Bundle, options: EngineOptions, tell: Say) -> Sequence[str]:
    if not bundle.norms:
        tell("the bundle has no fused norm: there is nothing for the plugin to do")
        return ("native",)
    return VARIANTS[options.plugin]


def _library(options: EngineOptions) -> Path:
    found = options.plugin_library or native_library("tensorrt")
    if found is None:
        raise BackendUnavailable(
            "the TensorRT plugin library is not built: run python -m rmsnorm_deploy.native build --tensorrt, "
            "or give --plugin never"
        )
    return found.resolve()


def _build(
    bundle: Bundle,
    options: EngineOptions,
    profiles: Sequence[Profile],
    variant: str,
    variants: Sequence[str],
    tell: Say,
) -> EngineRecord:
    library = _library(options) if variant == "plugin" else None
    name = f"{options.runtime}-sm{'-'.join(map(str, options.sms))}-{variant}"
    folder = bundle.path / "engines"
    folder.mkdir(exist_ok=True)
    engine = folder / f"{name}.engine"
    with tempfile.TemporaryDirectory() as scratch:
        request = BuildRequest(
            model=str(bundle.model_path.resolve()),
            engine=str(engine.resolve()),
            answer=str(Path(scratch) / "answer.json"),
            runtime=options.runtime,
            sms=list(options.sms),
            profiles=[_as_json(profile) for profile in profiles if profile],
            plugin=None if library is None else str(library),
            norms=[norm.node for norm in bundle.norms],
            opset=int(bundle.manifest.get("opset", 18)),
            timing_cache=None if options.timing_cache is None else str(options.timing_cache.resolve()),
            verbose=options.verbose,
            progress=sys.stderr.isatty(),
        )
        try:
            answer = run_worker(request, Path(scratch))
        finally:
            partial(engine).unlink(missing_ok=True)
    record = _record(name, engine, options, answer, profiles, library, bundle)
    extra = {
        "plugin_sha256": None if library is None else sha256(library),
        "variant": variant,
        "variants_built": list(variants),
        "plugin_layers": answer.plugin_layers,
        "io": answer.io,
        "build_seconds": round(answer.seconds, 2),
        "build_peak_bytes": answer.peak_bytes,
    }
    write_json(folder / f"{name}.json", as_metadata(record, **extra))
    _remember(record, tell)
    tell(
        f"{name}: {answer.plugin_layers} plugin layers of {answer.layers}, {engine.stat().st_size / 2**20:.1f} MB, "
        f"{answer.seconds:.1f} s, {answer.peak_bytes / 2**30:.2f} GB at most"
    )
    return record


def _remember(record: EngineRecord, tell: Say) -> None:
    try:
        remember(record.sha256)
    except OSError as error:
        tell(f"warning: {record.name} will need allow_host_code=True: {error.filename}: {error.strerror}")


def _as_json(profile: Profile) -> dict[str, dict[str, list[int]]]:
    return {n: {"min": list(r.low), "opt": list(r.best), "max": list(r.high)} for n, r in profile.items()}


def _record(
    name: str,
    engine: Path,
    options: EngineOptions,
    answer: BuildAnswer,
    profiles: Sequence[Profile],
    library: Path | None,
    bundle: Bundle,
) -> EngineRecord:
    tensors = {mode: {t["name"]: t["dtype"] for t in answer.io if t["mode"] == mode} for mode in ("input", "output")}
    return EngineRecord(
        name=name,
        path=engine,
        sha256=sha256(engine),
        model_sha256=model_identity(bundle.manifest),
        runtime=options.runtime,
        runtime_version=answer.version,
        version_compatible=False,
        sm=options.sms,
        precision=options.precision,
        plugin=None if library is None else "embedded",
        profiles=tuple(profile for profile in profiles if profile),
        inputs=tensors["input"],
        outputs=tensors["output"],
        milliseconds=None,
    )
