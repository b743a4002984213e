"""Fits the constants of `cookbook.gemm.cost` to measured times: `python -m bench.fit_cost`.

`results/h200/matmul_configs.json` has the times of many configurations on many problems. The fit wants two things:
small errors, above all on the fastest configurations; and a small regret, which is the time of the configuration that
the model prefers over that of the best one measured.
"""

import collections
import dataclasses
import math

import numpy as np

from cookbook.gemm import cost
from cookbook.gemm.plan import Config
from lab import results

NAMES = [field.name for field in dataclasses.fields(cost.Constants)]
SLOWEST = 1.8  # Configurations that take this many times as long as the best say little about the fast ones.


def measured() -> list[tuple[cost.Problem, Config, float]]:
    """(problem, configuration, microseconds) of each measurement worth fitting."""
    data = results.load("matmul_configs", "h200")
    rows = []
    for m, n, k, *values, us in data["times"]:
        fields = dict(zip(data["columns"][3:-1], values, strict=True))
        fields |= dict(second_kernel=bool(fields["second_kernel"]), swapped=bool(fields["swapped"]))
        rows.append((cost.Problem(m, n, k, (False, True)), Config(**fields), us))
    best = _best(rows)
    return [row for row in rows if row[2] < SLOWEST * best[row[0]] and row[1].store_slots == 2]


def _best(rows) -> dict:
    best = collections.defaultdict(lambda: math.inf)
    for problem, _, us in rows:
        best[problem] = min(best[problem], us)
    return best


def score(constants: cost.Constants, rows) -> tuple[float, float, float]:
    """(what the fit makes small, median relative error, mean regret), the last two in logarithms."""
    best, preferred, errors, weights = _best(rows), {}, [], []
    for problem, config, us in rows:
        predicted = cost.predict(config, problem, constants)
        # The model may choose any of the configurations that it predicts as equal: the slowest one counts.
        preferred[problem] = min(preferred.get(problem, (math.inf, -us)), (predicted, -us))
        errors.append(abs(math.log(predicted / us)))
        weights.append((best[problem] / us) ** 2)
    regret = float(np.mean([math.log(-us / best[problem]) for problem, (_, us) in preferred.items()]))
    return regret + 0.3 * float(np.mean(np.multiply(weights, errors))), float(np.median(errors)), regret


def fit(rows, steps: int = 600, seed: int = 0) -> cost.Constants:
    """A random search from the constants of today: each step changes about a quarter of them by a tenth."""
    rng, best = np.random.default_rng(seed), cost.H200
    least = score(best, rows)[0]
    for _ in range(steps):
        factors = np.exp(0.1 * rng.normal(size=len(NAMES)) * (rng.random(len(NAMES)) < 0.25))
        trial = cost.Constants(*(getattr(best, name) * f for name, f in zip(NAMES, factors, strict=True)))
        if (value := score(trial, rows)[0]) < least:
            best, least = trial, value
    return best


def main():
    rows = measured()
    for name, constants in (("today", cost.H200), ("fitted", fit(rows))):
        _, error, regret = score(constants, rows)
        print(f"{name}: {len(rows)} times, median error {math.expm1(error):.1%}, mean regret {math.expm1(regret):.1%}")
    for name in NAMES:
        print(f"    {name}: float = {getattr(constants, name):.4g}")


if __name__ == "__main__":
    main()
