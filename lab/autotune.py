"""The fastest configuration of a kernel for a problem, found by timing those that the caller lists."""

import concurrent.futures
import dataclasses
import functools
import inspect
import json
import math
import os

import jax
import jax.numpy as jnp
from tqdm import tqdm

from . import interpreter, program, results, timing

TOPIC = "configs"  # `results/<gpu>/configs.json`.
WRONG_ABOVE = 1e-2  # Relative distance from the result of the op's own choice: roundings to 16 bits are 2e-3.


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Result of `autotune`: the `best` configuration, and milliseconds of each one tried (NaN: see `failures`)."""

    op: str
    problem: str
    best: object
    trials: dict[object, float]
    failures: dict[object, str]
    recorded: bool = False

    @property
    def ms(self) -> float:
        return self.trials[self.best]

    def __repr__(self) -> str:
        """The fastest ten, by what sets them apart from the best."""
        lines = [f"{self.op}, {self.problem}: {len(self.trials)} configurations" + " [recorded]" * self.recorded]
        fastest = sorted((config for config in self.trials if config not in self.failures), key=self.trials.get)
        for config in fastest[:10]:
            lines.append(f"  {self.trials[config]:8.4f} ms  {_difference(config, self.best) or config}")
        if self.failures:
            lines.append(f"  {len(self.failures)} failed, such as: {next(iter(self.failures.values()))}")
        return "\n".join(lines)


def autotune(op, *args, configs, iterations: int = 10, refresh: bool = False, gpu: str = "h200", **kwargs) -> Tuning:
    """Times `op(*args, config=c, **kwargs)` for each `c` of `configs`; the fastest is `.best` of what it returns.

    Configurations are compiled in parallel and timed one at a time. One that fails, or whose result differs from that
    of the op's own choice, is out. Each time goes to `results/<gpu>/configs.json` at once: an interrupted search goes
    on where it was. Times of other code than the op has now are taken anew. The op does not read that file: call it
    with `config=found.best`.

    Without a GPU as new as `gpu`: the times in its file.

    Args:
      op: a kernel of this package that takes `config`.
      *args, **kwargs: its arguments, which name the problem.
      configs: an iterable of configurations, such as `cost.ranked(problem, 40)`.
      iterations: timed calls of each configuration, of which the median counts.
      refresh: forget the times in the file.
      gpu: the GPU whose tensor cores the op needs, "h200" or "b200".

    Raises:
      ValueError: `configs` is empty; RuntimeError: no GPU and nothing in the file, or all failed.
    """
    op, configs = inspect.unwrap(op), list(dict.fromkeys(configs))
    if not configs:
        raise ValueError("configs is empty: pass the configurations to try, such as cost.ranked(problem, 40)")
    config_type, problem = type(configs[0]), problem_name(*args, **kwargs)
    if not interpreter.on_gpu(gpu):
        entry = results.load(TOPIC, gpu).get(op.__name__, {}).get(problem)
        if entry is None or "best" not in entry:
            raise RuntimeError(f"nothing was recorded for {op.__name__}, {problem}, and there is no GPU to time it on")
        return _tuning(op.__name__, problem, entry, config_type, recorded=True)

    gpu = results.this_gpu()
    own_choice = program.digest(functools.partial(op, **kwargs), *args, gpu=gpu)
    data = results.load(TOPIC, gpu)
    entry = data.setdefault(op.__name__, {}).setdefault(problem, {})
    if refresh or entry.get("program") != own_choice:
        entry.clear()
        entry.update(program=own_choice, trials=[])
    known = {json.dumps(trial["config"], sort_keys=True) for trial in entry["trials"]}
    waiting = [c for c in configs if json.dumps(dataclasses.asdict(c), sort_keys=True) not in known]
    call = lambda config: functools.partial(op, config=config, **kwargs)
    wanted = op(*args, **kwargs) if waiting else None
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        compiling = [(config, pool.submit(_compile, call(config), args)) for config in waiting]
        for config, future in tqdm(compiling, desc=op.__name__, unit="config", disable=not compiling):
            trial = dict(config=dataclasses.asdict(config))
            try:
                compiled = future.result()
                if not (error := _distance(compiled(*args), wanted)) < WRONG_ABOVE:
                    raise ArithmeticError(f"its result is not that of the op's own choice: {error:.1e} apart")
                trial["ms"] = timing.median_ms(compiled, args, iterations)
            except Exception as error:
                trial["failure"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            entry["trials"].append(trial)
            _update_best(entry)
            results.save(TOPIC, gpu, data)
    if "best" not in entry:
        raise RuntimeError(
            f"no configuration of {op.__name__} ran for {problem}; the first failure: {entry['trials'][0]['failure']}"
        )
    return _tuning(op.__name__, problem, entry, config_type)


def problem_name(*arrays, **options) -> str:
    """The problem as the file names it: "bfloat16[64,512] bfloat16[32,512] transpose_b=True". False is left out."""
    given = {name: value for name, value in sorted(options.items()) if value is not None and value is not False}
    return " ".join([*map(_described, arrays), *(f"{name}={_described(value)}" for name, value in given.items())])


def _described(value) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", str(value))


def _compile(fn, args):
    return jax.jit(fn).lower(*args).compile()


def _distance(out, wanted) -> float:
    """The relative distance of two results; where there are several, the largest."""
    pairs = [
        [jnp.asarray(x, jnp.float32).ravel() for x in pair]
        for pair in zip(*map(jax.tree.leaves, (out, wanted)), strict=True)
    ]
    return max(float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-30)) for a, b in pairs)


def _update_best(entry: dict) -> None:
    timed = [trial for trial in entry["trials"] if "ms" in trial]
    if timed:
        best = min(timed, key=lambda trial: trial["ms"])
        entry.update(best=best["config"], ms=best["ms"], provenance=results.machine())


def _tuning(op: str, problem: str, entry: dict, config_type, recorded: bool = False) -> Tuning:
    trials = {config_type(**trial["config"]): trial.get("ms", math.nan) for trial in entry["trials"]}
    failures = {config_type(**t["config"]): t["failure"] for t in entry["trials"] if "failure" in t}
    return Tuning(op, problem, config_type(**entry["best"]), trials, failures, recorded)


def _difference(config, other) -> str:
    ours, theirs = dataclasses.asdict(config), dataclasses.asdict(other)
    return ", ".join(f"{name}={value}" for name, value in ours.items() if value != theirs[name])
