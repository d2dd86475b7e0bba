"""Builds one engine in a process of its own: ``python -m rmsnorm_deploy.engine.worker REQUEST.json``.

TensorRT may abort the process it runs in; the parent then reports that instead of ending with it.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from rmsnorm_deploy.engine.architectures import check_architectures
from rmsnorm_deploy.engine.request import MODULES, BuildAnswer, BuildRequest, partial
from rmsnorm_deploy.errors import BackendUnavailable, DeployError, InputError
from rmsnorm_deploy.runtime.optional import load_module
from rmsnorm_deploy.runtime.rtx_library import ensure_rtx_library

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}
PLAIN_OPSET = 22
NOISE = (
    # One such line for every node of every function body: their nodes have the same names wherever they are used.
    "already exists, the output tensors of this new instance will not be queryable",
    "has Int64 binding",  # "Make sure input x ...": the session binds every input by the dtype that the engine has
)


def main(argv: list[str]) -> int:
    request = BuildRequest.read(Path(argv[0]))
    answer = BuildAnswer()
    try:
        _Build(request, answer).run()
    except DeployError as error:
        answer.error = str(error)
        answer.kind = "backend" if isinstance(error, BackendUnavailable) else "input"
    answer.write(Path(request.answer))
    return 0


class _Build:
    def __init__(self, request: BuildRequest, answer: BuildAnswer) -> None:
        self.request, self.answer = request, answer
        self.trt: Any = load_module(*MODULES[request.runtime])
        answer.version = self.trt.__version__
        if request.runtime == "tensorrt-rtx":
            ensure_rtx_library()
        self.logger: Any = _logger(self.trt, request.verbose)
        self.builder: Any = self._builder()
        if request.plugin:
            self._load_plugin(Path(request.plugin))
        self.network: Any = self.builder.create_network(_network_flags(self.trt))

    def _builder(self) -> Any:
        try:
            builder = self.trt.Builder(self.logger)
        except (RuntimeError, TypeError) as error:
            raise BackendUnavailable(self._because(f"{self.request.runtime} cannot build here: {error}")) from error
        if builder is None:
            raise BackendUnavailable(self._because(f"{self.request.runtime} cannot build here"))
        return builder

    def _because(self, what: str) -> str:
        """``what`` and the first error that the library gave for it, on one line."""
        reasons = [line for line in self.logger.errors if line not in what]
        text = f"{what}: {reasons[0]}" if reasons else what
        return " ".join(text.split())[:600]

    def _hint(self) -> str:
        """Opset 23 brought whole-layer ops, which TensorRT has in part; below, models are made of those that it has."""
        if self.request.opset <= PLAIN_OPSET:
            return ""
        return f": the bundle is of opset {self.request.opset}; try one exported with --opset 18"

    def _load_plugin(self, library: Path) -> None:
        if not library.is_file():
            raise InputError(f"there is no plugin library {library}: python -m rmsnorm_deploy.native build --tensorrt")
        registry = self.trt.get_plugin_registry()
        handle = registry.load_library(str(library))
        ours = [creator for creator in registry.all_creators if creator.plugin_namespace == "rmsnorm_deploy"]
        if handle is None or not ours:
            raise InputError(self._because(f"{library} is not a plugin library of this package (no getCreators)"))
        check_architectures(library, self.request.sms)

    def run(self) -> None:
        started = time.perf_counter()
        self._parse()
        self._inspect()
        config = self._config()
        serialized = self.builder.build_serialized_network(self.network, config)
        if serialized is None:
            raise InputError(
                self._because(f"{self.request.runtime} could not build {self.request.model}") + self._hint()
            )
        self._save_timing_cache(config)
        target = Path(self.request.engine)
        partial(target).write_bytes(bytes(serialized))
        os.replace(partial(target), target)
        self.answer.seconds = time.perf_counter() - started
        self.answer.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _parse(self) -> None:
        parser = self.trt.OnnxParser(self.network, self.logger)
        if parser.parse_from_file(self.request.model):
            _allow_decomposed_attention(self.trt, self.network)
            return
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        first = f"{errors[0].desc()} (node {errors[0].node_name()!r})" if errors else "no reason given"
        because = self._because(f"{self.request.runtime} cannot parse {self.request.model}: {first}")
        raise InputError(because + self._hint())

    def _inspect(self) -> None:
        """Every norm must be a plugin layer where the plugin is wanted, and none where it is not."""
        plugins = set()
        for index in range(self.network.num_layers):
            layer = self.network.get_layer(index)
            if layer.type == self.trt.LayerType.PLUGIN_V3:
                plugins.add(layer.name)
        self.answer.layers = self.network.num_layers
        self.answer.plugin_layers = len(plugins)
        wrong = [name for name in self.request.norms if (name in plugins) != bool(self.request.plugin)]
        if wrong:
            count = f"{len(wrong)} of {len(self.request.norms)} norms"
            became = "did not become plugin layers" if self.request.plugin else "became plugin layers, and were not to"
            raise InputError(f"{count} {became}: {wrong[0]!r} is the first")
        for kind in ("input", "output"):
            for index in range(getattr(self.network, f"num_{kind}s")):
                self.answer.io.append(self._tensor(kind, getattr(self.network, f"get_{kind}")(index)))

    def _tensor(self, kind: str, tensor: Any) -> dict[str, Any]:
        dtype = DTYPES.get(tensor.dtype.name, tensor.dtype.name.lower())
        return {"name": tensor.name, "dtype": dtype, "shape": list(tensor.shape), "mode": kind}

    def _config(self) -> Any:
        config = self.builder.create_builder_config()
        if self.request.runtime == "tensorrt-rtx" and self.request.sms:
            config.num_compute_capabilities = len(self.request.sms)
            for index, sm in enumerate(self.request.sms):
                config.set_compute_capability(_capability(self.trt, sm), index)
        for given in self.request.profiles:
            profile = self.builder.create_optimization_profile()
            for name, shapes in given.items():
                profile.set_shape(name, *(tuple(shapes[key]) for key in ("min", "opt", "max")))
            if config.add_optimization_profile(profile) < 0:
                raise InputError(self._because("TensorRT refuses the profile: give another --profile"))
        if self.request.plugin:
            config.plugins_to_serialize = [self.request.plugin]
        if self.request.progress:
            config.progress_monitor = _monitor(self.trt)
        self._load_timing_cache(config)
        return config

    def _load_timing_cache(self, config: Any) -> None:
        if self.request.timing_cache is None:
            return
        path = Path(self.request.timing_cache)
        data = path.read_bytes() if path.is_file() else b""
        cache = config.create_timing_cache(data)
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise InputError(self._because(f"{path} is not a timing cache of this TensorRT: delete it"))

    def _save_timing_cache(self, config: Any) -> None:
        if self.request.timing_cache is not None:
            cache = config.get_timing_cache()
            if cache is not None:
                Path(self.request.timing_cache).write_bytes(bytes(cache.serialize()))


def _network_flags(trt: Any) -> int:
    """Strongly typed: the model's own dtypes are what runs. Newer versions know nothing else and have no flag."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def _allow_decomposed_attention(trt: Any, network: Any) -> None:
    """The op Attention of opset 23 has fused kernels for few shapes and dtypes; without one it may be taken apart."""
    attention_ends = getattr(trt.LayerType, "ATTENTION_OUTPUT", None)  # versions before it take every one apart
    for index in range(network.num_layers if attention_ends is not None else 0):
        layer = network.get_layer(index)
        if layer.type == attention_ends:
            layer.__class__ = trt.IAttentionOutputLayer  # how these bindings make a layer the kind that it is
            layer.attention.decomposable = True


def _capability(trt: Any, sm: int) -> Any:
    known = {name[2:]: value for name, value in trt.ComputeCapability.__members__.items() if name.startswith("SM")}
    if str(sm) not in known:
        raise InputError(f"--sm {sm}: tensorrt-rtx builds for {', '.join(sorted(known, key=int))}")
    return known[str(sm)]


def _logger(trt: Any, verbose: bool) -> Any:
    least = trt.ILogger.INFO if verbose else trt.ILogger.WARNING

    class Logger(trt.ILogger):  # type: ignore[misc]
        """Prints what matters, and keeps the errors for the one line that a refusal has."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.ERROR:
                self.errors.append(message)
            if severity <= least and (verbose or not any(noise in message for noise in NOISE)):
                print(message, file=sys.stderr)

    return Logger()


def _monitor(trt: Any) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """The builder's own phases, on one line of the terminal."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def step_complete(self, phase: str, step: int) -> bool:
            print(f"\r  {phase}: {step + 1}/{self.steps.get(phase, 0)}\033[K", end="", file=sys.stderr, flush=True)
            return True

        def phase_finish(self, phase: str) -> None:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    return Monitor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
