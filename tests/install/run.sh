#!/usr/bin/env bash
# usage: run.sh BUILD SCRATCH SOURCE
set -euo pipefail
build=$1 scratch=$2 source=$3
rm -rf "$scratch/prefix" "$scratch/foreign"
cmake --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log"
cmake -S "$source/foreign_project" -B "$scratch/foreign" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$scratch/foreign" --parallel 2
"$scratch/foreign/train_one_step"
"$scratch/foreign/own_names"
# One folder of ours on a program's include path.
[ "$(ls "$scratch/prefix/include")" = dsengine ]
"$scratch/prefix/bin/ds-tool" checkpoint --help >"$scratch/tool.log"
"$scratch/prefix/bin/ds-tool" bench --max 4K >>"$scratch/tool.log"
"$scratch/prefix/bin/ds-tool" report >"$scratch/report.log"
grep -q '^  libtorch  *[0-9]' "$scratch/report.log"
