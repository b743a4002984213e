#!/usr/bin/env bash
# Resolves pyproject.toml into the two hash-pinned locks; keeps what they pin unless told `--upgrade`. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
lock() {
  local output=$1
  shift
  uv pip compile pyproject.toml "$@" --extra lab --extra site --extra dev --universal --python-version 3.12 --generate-hashes \
    --no-emit-index-url --custom-compile-command tools/lock.sh --quiet --constraint tools/pins.txt --output-file "$output"
}
lock requirements.lock --extra aot "$@"
lock requirements-cuda13.lock --extra cuda13 "$@"
