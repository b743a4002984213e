"""Settings and fixtures of all tests, those in notebooks included."""

import contextlib
import gc
import os
import zlib

import pytest

from tests.starting import started_again
from tools.gpus import one_of

# Before JAX is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # Several test processes share a GPU's memory.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # JAX doubles what it holds each time, and would take all that is left. Chapter 16 needs more than 24 GB.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    if not os.environ.get("COOKBOOK_ALL_GPUS"):  # Set for the tests that need several.
        os.environ |= one_of(int(worker.removeprefix("gw")))
if not os.environ.get("XLA_FLAGS"):  # References are compiled once and run once: compiled quickly rather than well.
    os.environ["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true "
        "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    )
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # The compile-only wheels come without cuDNN.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")  # Without a folder nothing is kept, but JAX hashes programs.
gc.set_threshold(20_000, 10, 5)  # At the default, 700 objects, a tenth of the time goes into looking for garbage.

FAMILIES = ("attn", "gemm", "loss", "nvlink", "recurrent", "rows", "select")  # Folders of tests.
# Folders of whose tests `make test` runs the first case alone.
QUICK = (*FAMILIES, "bench", "blackwell", "exercises", "serving")
SECONDS = 300  # A kernel that deadlocks hangs on a GPU, and a loop that never ends hangs anywhere.


def pytest_addoption(parser):
    parser.addoption(
        "--first-cases", action="store_true", help="run the first cases alone: of a file, of each test of lab"
    )


def pytest_configure(config):
    if config.pluginmanager.hasplugin("nbval"):
        from nbval import kernel

        kernel.start_new_kernel = started_again(kernel.start_new_kernel)


def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Failures(reporter))


class _Failures:
    """Names each failure when it happens: a long run may be cut off before its end."""

    def __init__(self, reporter):
        self.reporter = reporter

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            # A notebook's cell has no such thing, and its traceback ends with what was raised.
            text = crash.message.partition("\n")[0] if crash else report.longreprtext.rstrip().rpartition("\n")[2]
            self.reporter.ensure_newline()
            self.reporter.write_line(f"{report.nodeid}: {text[:200] or report.when}")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """The CPU computes what test modules compute when they are imported: each worker imports all of them."""
    import jax
    from jax.experimental.mosaic.gpu import layout_inference

    from cookbook import _host

    layout_inference.ValueSite.__str__ = _name_of_site
    _host.allow_waiting_threads()  # Before JAX starts a backend.
    with jax.default_device(jax.devices("cpu")[0]):
        collected = yield
    gc.collect()
    gc.freeze()  # Modules and tests stay until the end: the collector need not look at them again.
    return collected


def _name_of_site(site) -> str:
    """As in JAX, which prints an operation with its regions for it, and checks it first: a tenth of all lowering."""
    from jax.experimental.mosaic.gpu.layout_inference import _op_name_regex

    start = _op_name_regex.match(site.operation.operation.get_asm(skip_regions=True, assume_verified=True))
    return f"{start[0]}:{site.type.name[0].lower()}-{site.index}"


def pytest_collection_modifyitems(config, items):
    if config.getoption("first_cases"):
        _keep_first_cases(config, items)
    first = {}  # The first case of each test that is not slow, if there is one.
    for item in items:
        if "mutant" in item.name:  # They test the tests.
            item.add_marker(pytest.mark.slow)
        before = first.setdefault(_test_of(item), item)
        if before.get_closest_marker("slow") and not item.get_closest_marker("slow"):
            first[_test_of(item)] = item
    for item in items:
        item.is_first_case = first[_test_of(item)] is item
        if item.path.parent.name in QUICK and not item.is_first_case:
            item.add_marker(pytest.mark.slow)
        if config.pluginmanager.hasplugin("timeout") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))
    items[:] = _with_notebooks_spread(items)


def _test_of(item) -> tuple:
    """Key of the cases of which one is the first: those of a test, or of a chapter in a test of all exercises."""
    of_chapters = item.path.name == "test_solutions.py" and hasattr(item, "callspec")
    return item.path, getattr(item, "originalname", None), of_chapters and item.callspec.params.get("stem")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A notebook's kernel, which its first cell starts, prints the bounds of the GPU that the notebook is of. It shows
    recorded figures: a GPU that tests share gives none. Tests find the same figures and bounds on each machine."""
    gpu = "h200"
    for name in ("COOKBOOK_MEASURE", "COOKBOOK_RECORD"):  # The benchmark sets the second, also for the test after it.
        os.environ.pop(name, None)
    if hasattr(item.parent, "nb"):
        from lab import results

        gpu = results.gpu_of(item.parent.nb.metadata.get("recorded", {}).get("gpu", gpu))
        os.environ["COOKBOOK_MEASURE"] = "0"
    os.environ["COOKBOOK_GPU"] = gpu


def _with_notebooks_spread(items) -> list:
    """The notebooks, the longest first, with as many tests after each: all at once fill a GPU's memory.

    The last ones are longer. Tests stay together with others of their file, and files are in an order that has quick
    and slow ones anywhere; the last fifth of the tests comes after all notebooks. Files that one worker runs come
    first."""
    cells, tests = {}, []
    for item in items:
        if item.path.suffix == ".ipynb":
            cells.setdefault(item.path, []).append(item)
        else:
            tests.append(item)
    if not cells:
        return tests
    tests.sort(key=lambda item: (not _is_whole(item.nodeid), zlib.crc32(item.nodeid.split("::")[0].encode())))
    share = max(1, int(0.8 * len(tests) / len(cells)))
    spread = []
    for i, path in enumerate(sorted(cells, reverse=True)):
        spread += cells[path] + tests[i * share : (i + 1) * share]
    return spread + tests[len(cells) * share :]


def _is_whole(nodeid: str) -> bool:
    """Whether one worker runs the file: the tests of serving share a trace that takes long to answer, those of the
    browser one site."""
    return any(part in nodeid for part in (".ipynb::", "test_serving.py::", "test_browser.py::"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a worker all cells of a notebook, which share a kernel, all cases of a test, or a chapter's exercises."""
    from xdist.scheduler import LoadScopeScheduling

    class ByTest(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if _is_whole(nodeid):
                return nodeid.split("::")[0]
            return nodeid.split("-" if "test_solutions.py::" in nodeid else "[")[0]

    config.option.loadscopereorder = False  # It would have all notebooks first, which have the most cells.
    return ByTest(config, log)


def _keep_first_cases(config, items):
    """Keeps the first case of the first test of each file and of those of the compiler, of each test of lab, and
    notebooks whole."""
    kept, names = [], {}
    for item in items:
        name, of_file = getattr(item, "originalname", None), names.setdefault(item.path, set())
        is_wanted = not of_file or "compile" in str(name) or item.path.parent.name == "lab"
        if name is None or (name not in of_file and is_wanted):
            kept.append(item)
        of_file.add(name)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _compile_nothing(fn, args, gpu):
    """In place of what `lab.check` compiles with."""
    return [], None


def _lower_alone(fn, args, gpu):
    """In place of what `lab.check` compiles with: Mosaic says which layouts it refuses, LLVM and ptxas are left out."""
    from tests.lowering import lowered

    if gpu is not None:
        lowered(fn, *args)
    return [], None


@pytest.fixture(autouse=True)
def compiles_first_cases_in_full_runs(request, monkeypatch):
    """`lab.check` only runs the cases of families, but for the first of each test in `make test ALL=1` without a GPU:
    it compiles that, too; of a slow test it lowers it.

    To compile each for an H200 takes almost as long. All families have tests of what the compiler makes of their
    kernels, and a GPU compiles what it runs."""
    import lab
    from lab import checking

    is_first = request.config.option.markexpr != "not slow" and request.node.is_first_case and not lab.on_gpu()
    is_slow = request.node.get_closest_marker("slow") is not None
    if request.path.parent.name in FAMILIES and (is_slow or not is_first):
        monkeypatch.setattr(checking, "_compile", _lower_alone if is_first else _compile_nothing)


@pytest.fixture
def no_gpu(monkeypatch):
    """`lab` behaves as on a machine without a GPU."""
    import lab

    monkeypatch.setattr(lab.interpreter, "on_gpu", lambda *_: False)
    monkeypatch.setattr(lab, "on_gpu", lambda *_: False)


@pytest.fixture
def on_cpu(request):
    """For what launches no kernels of this package, such as models in XLA and arithmetic of indices: XLA compiles
    sooner for a CPU. In a file of such tests, one that does launch kernels is marked `kernels`."""
    import jax

    if not request.node.get_closest_marker("kernels"):
        jax.config.update("jax_default_device", jax.devices("cpu")[0])  # For the threads of an engine too.
    yield
    jax.config.update("jax_default_device", None)


@pytest.fixture
def run_only(monkeypatch, request):
    """`lab.check` runs a kernel in the interpreter and does not compile it: for mutants, which running finds."""
    import lab
    from lab import checking

    if lab.on_gpu():
        pytest.skip("runs in the interpreter alone, which finds the same on a machine without a GPU")
    request.getfixturevalue("no_gpu")
    monkeypatch.setattr(checking, "_compile", _compile_nothing)


@pytest.fixture
def found_if():
    """`with found_if(old != new): lab.check(...)`: a mutant must fail its check, and what was not changed pass it, or
    the check finds fault with all."""
    from lab import CheckError

    failed = lambda: pytest.raises(CheckError, match=r"(?m)^(races|result): |^runs: .*(?i:wait|phase|barrier)")
    return lambda is_mutant: failed() if is_mutant else contextlib.nullcontext()


@pytest.fixture
def results_folder(monkeypatch, tmp_path):
    """An empty `results/` that belongs to the test alone."""
    from lab import results

    monkeypatch.setattr(results, "ROOT", tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def gpu():
    """Skips where no kernel can run on a GPU: CI's CPU machines test the rest."""
    import lab

    if not lab.on_gpu():
        pytest.skip("needs a Hopper or newer GPU")


@pytest.fixture
def pretend_gpu(monkeypatch):
    """`pretend_gpu("NVIDIA B200", "10.0")`: to this project JAX seems to see this GPU, on which nothing can run."""
    import jax

    class Gpu:
        def __init__(self, name: str, capability: str):
            self.device_kind, self.compute_capability, self.core_count = name, capability, 148

    def pretend(name: str, capability: str):
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda *_: [Gpu(name, capability)])

    return pretend


@pytest.fixture
def mutant(monkeypatch):
    """`mutant(module, name, **changes)` breaks a kernel: the namespace `module.name` with some of its members changed.

    Nothing that was traced of the right kernel is used for the wrong one, or the other way round.
    """
    import jax

    class Changed:
        def __init__(self, namespace, changes):
            self.__dict__.update(changes, _namespace=namespace)

        def __getattr__(self, name):
            return getattr(self._namespace, name)

    def change(module, name, **changes):
        monkeypatch.setattr(module, name, Changed(getattr(module, name), changes))

    jax.clear_caches()
    yield change
    jax.clear_caches()
