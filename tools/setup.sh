#!/usr/bin/env bash
# Makes the virtual environment that every make target uses. Says nothing when there is nothing to do.
#
#   VENV=.venv              where the environment is made
#   COOKBOOK_PYTHON=...     the interpreter to use; "download" lets uv fetch one
#   JAX_VERSION=0.12.0.1    another JAX than the locked one, everything else as locked
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}

lock=requirements.lock
if [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; then
  lock=requirements-cuda13.lock
fi

stamp="$lock $(cksum <"$lock") jax ${JAX_VERSION:-as locked} in $PWD"
if [ "$(cat "$venv/.ready" 2>/dev/null)" = "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
  exit 0
fi

fail() {
  printf 'make: %s\n' "$@" >&2
  exit 1
}

[ "$(uname -sm)" = "Linux x86_64" ] || [ "$(uname -sm)" = "Linux aarch64" ] || fail \
  "this is $(uname -sm); JAX's CUDA wheels, with which kernels are compiled even without a GPU, exist for Linux alone." \
  "On Windows use WSL 2, on a Mac a Linux container."

# A name on PATH proves nothing (pyenv leaves shims of versions that are not active), so each candidate is run.
fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in python3.12 python3.13 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    if fits "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

if [ "${COOKBOOK_PYTHON:-}" = download ]; then
  python=3.12
elif [ -n "${COOKBOOK_PYTHON:-}" ]; then
  fits "$COOKBOOK_PYTHON" || fail "COOKBOOK_PYTHON=$COOKBOOK_PYTHON is not a working Python 3.12 or newer."
  python=$COOKBOOK_PYTHON
else
  python=$(find_python) || fail \
    "no Python 3.12 or newer was found: each python3.12, python3.13, python3 and python on PATH was run, and pyenv's." \
    "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name one: COOKBOOK_PYTHON=/path/to/python3.12," \
    "or let uv download one: COOKBOOK_PYTHON=download."
fi

if uv --version >/dev/null 2>&1; then
  uv=(uv)
else
  if ! .uv/bin/python -m uv --version >/dev/null 2>&1; then
    echo "Installing uv (once, into .uv) ..."
    host=$python
    [ "$python" = 3.12 ] && host=python3
    rm -rf .uv
    "$host" -m venv .uv >/dev/null || fail \
      "$host cannot make a virtual environment. Install its venv module (apt install python3-venv), or uv."
    .uv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.8 || fail \
      "uv could not be installed: is there a network? On a host without one use PYTHON=python3 (see CONTRIBUTING.md)."
  fi
  uv=(.uv/bin/python -m uv)
fi

if [ "$lock" = requirements-cuda13.lock ]; then
  echo "NVIDIA driver found: installing JAX's CUDA 13 build into $venv (2.7 GB the first time) ..."
else
  echo "No NVIDIA driver found: installing JAX's CPU build and the compile-only GPU wheels into $venv (1.7 GB) ..."
fi
rm -f "$venv/.ready"
download=--no-python-downloads
[ "$python" = 3.12 ] && download=--managed-python
"$venv/bin/python" -c '' 2>/dev/null ||
  "${uv[@]}" venv --quiet --clear --seed "$download" --python "$python" --prompt cookbook "$venv"
"${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes -r "$lock"
if [ -n "${JAX_VERSION:-}" ]; then
  echo "Replacing the locked JAX by $JAX_VERSION ..."
  jax=$("${uv[@]}" pip freeze --quiet --python "$venv/bin/python" | sed -nE "s/^(jax|jaxlib|jax-cuda13-[a-z]+)==.*/\1==$JAX_VERSION/p")
  # shellcheck disable=SC2086  # one requirement a word
  "${uv[@]}" pip install --quiet --python "$venv/bin/python" --no-deps $jax
fi
# Every interpreter of this environment starts with the checkout on its path (no build needed), and, without a GPU,
# JAX on the CPU: its GPU plugin is there for compiling alone and would complain at each start.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
{
  pwd
  if [ "$lock" = requirements.lock ]; then
    echo 'import os; os.environ.setdefault("JAX_PLATFORMS", "cpu")'
  fi
} >"$packages/cookbook-checkout.pth"
echo "$stamp" >"$venv/.ready"
echo "Ready: $("$venv/bin/python" -c 'import sys, importlib.metadata as m
print("Python", sys.version.split()[0], "with JAX", m.version("jax"))')."
