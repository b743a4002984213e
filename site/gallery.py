"""The gallery: each kernel, what bounds it, what it costs, and how fast it is beside its peers."""

import concurrent.futures
import functools
import html
import inspect
import os
import re

from measured import GPU, bound, in_order, peers_legend, rate_text, share_text, stale_mark

import cookbook
from bench.problems import CASES
from lab import ToolchainMissing, compile_for, results, roofline


def gallery_page(chapters) -> str:
    """One section a kernel: what it does, what bounds it, what it costs, how fast it is beside its peers."""
    page = [
        "# Gallery",
        "",
        "Every finished kernel. A full bar is the roofline bound of the GPU that it ran on, an H200 or an H100, by its "
        "datasheet; for the kernels of `blackwell`, which nobody has measured yet, it will be a B200's. Registers, "
        "spills and shared memory are the compiler's, at the first problem shown, and need no GPU to find out.",
        "",
        *peers_legend(),
        "",
    ]
    kernels = dict(_kernels())
    with concurrent.futures.ProcessPoolExecutor(min(os.cpu_count(), 8)) as pool:  # A kernel compiles in 1 to 5 s.
        for (name, function), facts in zip(kernels.items(), pool.map(_facts, kernels), strict=True):
            page += _kernel_section(name, function, facts, chapters)
    return "\n".join(page)


def _kernels():
    """(name, function) of each kernel that the package exports, in its order."""
    for name, value in vars(cookbook).items():
        if name in cookbook.__all__ and inspect.isfunction(inspect.unwrap(value)):
            yield name, inspect.unwrap(value)
    for name in cookbook.blackwell.__all__:
        if hasattr(value := getattr(cookbook.blackwell, name), "Config"):
            yield f"blackwell.{name}", value


def _kernel_section(name: str, function, facts: dict[str, str], chapters) -> list[str]:
    module = inspect.getmodule(function)
    problems = {p: impls for p, impls in in_order(_topic(name), _gpu(name)) if _ours(name) & impls.keys()}
    links = [f'<a class="source" href="_modules/{module.__name__.replace(".", "/")}.html">Source</a>']
    links.append(f'<a href="api.html#cookbook.{name}">Reference</a>')
    links += [
        f'<a href="chapters/{c.stem}.html">Chapter {c.number}: {c.title}</a>' for c in _chapters_of(name, chapters)
    ]
    cells = [f"<div><dt>{title}</dt><dd>{html.escape(text)}</dd></div>" for title, text in facts.items()]
    return [
        f"## {name}",
        "",
        _summary(function),
        "",
        f'<p class="links">{" ".join(links)}</p>',
        f'<dl class="facts simple">{"".join(cells)}</dl>',
        *(_bars(name, problems) or _why_no_bars(name)),
        "",
    ]


def _gpu(name: str) -> str:
    """The GPU that the kernel is measured on."""
    return "b200" if name.startswith("blackwell.") else GPU


def _why_no_bars(name: str) -> list[str]:
    return ["Compiled for a B200 and interpreted; never run, never timed."] if _gpu(name) == "b200" else []


def _topic(name: str) -> str:
    """The op whose problems the kernel is timed on: the rungs of the product on those of `matmul`."""
    is_rung = name.startswith("matmul_") and ".gemm." in getattr(cookbook, name).__module__
    return "matmul" if is_rung and all(case.op != name for case in CASES) else name


def _ours(name: str) -> set[str]:
    """Names that this kernel may have among the implementations of a problem."""
    return {"cookbook", name} if _topic(name) == name else {name}


def _summary(function) -> str:
    return " ".join(inspect.getdoc(function).split("\n\n")[0].split())


def _chapters_of(name: str, chapters):
    """The chapters that use the kernel, the last two of them: where it is built, and where it is last improved."""
    used = rf"\bcookbook(\.\w+)?\.{name}\b|from cookbook import .*\b{name}\b"
    if name.startswith("blackwell."):
        used = rf"\b{re.escape(name)}\b"
    last = name.split(".")[-1]  # Looked for before the pattern, which takes longer.
    using = [c for c in chapters if c.number[0].isdigit() and last in c.code and re.search(used, c.code)]
    return using[-2:]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _facts(name: str) -> dict[str, str]:
    """The kernel's bound and its costs, at the first problem of its kind."""
    cases = [case for case in CASES if case.op == _topic(name)]
    if not cases:
        return {}
    case = next((case for case in cases if case.impl == name), cases[0])
    kernel = case.kernel if name in (case.op, case.impl) else getattr(cookbook, name)
    least = roofline.bound(case.flops, case.nbytes, case.dtype, _gpu(name))
    facts = {"Bound by": f"{least.limited_by}, {_figure(least.intensity)} FLOP per byte"}
    try:
        compiled = compile_for(_gpu(name), kernel, *case.kernel_avals)
    except ToolchainMissing:
        return facts
    return facts | {
        "Registers": f"{compiled.registers} a thread",
        "Spills": f"{compiled.spill_bytes} bytes" if compiled.spill_bytes else "none",
        "Shared memory": f"{compiled.smem_bytes / 1024:.0f} KiB of 227",
    }


@functools.cache
def _stale_rows(gpu: str) -> set[tuple[str, str]]:
    """(problem, implementation) of each stale row."""
    return set(results.stale_list(gpu))


def _bars(name: str, problems: dict) -> list[str]:
    gpu, lines = _gpu(name), []
    stale = _stale_rows(gpu)
    for problem, impls in problems.items():
        lines.append(f'<span class="problem">{html.escape(problem)}</span>')
        for impl, row in sorted(impls.items(), key=lambda item: item[1]["ms"]):
            ours = " ours" if impl in _ours(name) else ""
            share = bound(problem, row).ms / row["ms"]
            lines.append(
                f'<span class="name{ours}">{html.escape(impl)}{stale_mark((problem, impl) in stale)}</span>'
                f'<span class="track"><i style="width:{min(share, 1):.1%}"></i></span>'
                f'<span class="value">{rate_text(row)} <small>{share_text(problem, row)}</small></span>'
            )
    return ['<div class="bars">', *lines, "</div>"] if lines else []
