#!/usr/bin/env bash
# usage: run.sh BUILD SCRATCH SOURCE
set -euo pipefail
build=$1 scratch=$2 source=$3
# Nothing is compiled twice: headers change seldom.
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
rm -rf "$scratch/prefix" "$scratch/foreign" "$scratch/headers" "$scratch"/torch_*
cmake --install "$build" --prefix "$scratch/prefix" >"$scratch/install.log"
cmake -S "$source/foreign_project" -B "$scratch/foreign" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_BUILD_TYPE=Release \
  "${launcher[@]}"
cmake --build "$scratch/foreign" --parallel 2
# Every public header alone, by the compiler of the build: with clang that takes half of GCC's time.
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
cmake -S "$source/foreign_project" -B "$scratch/headers" -DCMAKE_PREFIX_PATH="$scratch/prefix" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_CXX_COMPILER="$compiler"
cmake --build "$scratch/headers" --target headers_alone --parallel 2
cmake --build "$scratch/foreign" --target launch
"$scratch/foreign/own_names"
# One folder of ours on a program's include path.
[ "$(ls "$scratch/prefix/include")" = dsengine ]
"$scratch/prefix/bin/ds-tool" checkpoint --help >"$scratch/tool.log"
"$scratch/prefix/bin/ds-tool" bench --max 4K >>"$scratch/tool.log"
"$scratch/prefix/bin/ds-tool" report >"$scratch/report.log"
grep -q '^  libtorch  *[0-9]' "$scratch/report.log"
# The example GPT is installed when it is asked for, and finds its text from where it is then.
[ ! -e "$scratch/prefix/bin/gpt" ]
cmake --install "$build" --prefix "$scratch/prefix" --component Examples >>"$scratch/install.log"
env -u DS_GPT_DATA "$scratch/prefix/bin/gpt" --deepspeed_config "$scratch/prefix/share/dsengine/configs/zero2.json" \
  --layers 1 --hidden 32 --seq_len 32 --steps 1 --generate 0 >"$scratch/gpt.log"
grep -q 'prefix/share/dsengine/text/king_james.txt (1 files, 1048576 bytes)' "$scratch/gpt.log"

# --- a project with a find_package(Torch) of its own ---
torch=$(sed -n 's/^LibTorch_INCLUDE_DIR:PATH=//p' "$build/CMakeCache.txt")
torch=${torch%/include}

configure_with_torch() { # ORDER [OPTION...]
  local order=$1
  shift
  cmake -S "$source/project_with_torch" -B "$scratch/torch_$order" -DORDER="$order" -DCMAKE_BUILD_TYPE=Debug \
    -DCMAKE_PREFIX_PATH="$scratch/prefix" "${launcher[@]}" "$@"
}

expect_told() { # LOG TEXT, whichever way CMake has broken its lines
  if [[ "$(tr -s ' \n' ' ' <"$scratch/$1.log")" != *"$2"* ]]; then
    cat "$scratch/$1.log"
    echo "run.sh: expected '$2' above" >&2
    exit 1
  fi
}

# Works on every machine: Torch's own package is not asked.
configure_with_torch component
cmake --build "$scratch/torch_component"
"$scratch/torch_component/uses_both"

# So does the line of pkg-config, of the same sources.
export PKG_CONFIG_PATH="$scratch/prefix/lib/pkgconfig:$(echo "$scratch"/prefix/lib/*/pkgconfig)"
for source_file in own_library uses_both; do
  ${launcher:+ccache} g++ -std=c++20 -c "$source/project_with_torch/$source_file.cc" -o "$scratch/$source_file.o" $(pkg-config --cflags dsengine)
done
g++ "$scratch/own_library.o" "$scratch/uses_both.o" -o "$scratch/pkg_config_uses_both" $(pkg-config --libs dsengine)
"$scratch/pkg_config_uses_both"

# The first example comes ready to run, with a config of its own.
mkdir -p "$scratch/empty"
(cd "$scratch/empty" && "$scratch/prefix/bin/first_step") >"$scratch/first_step.log" 2>&1
grep -qE '^step 300  loss (0\.0|[0-9.]+e-)' "$scratch/first_step.log"
grep -q 'takes the one in .*/01_first_step$' "$scratch/first_step.log"

# A LibTorch of another minor version is refused where a program starts and where one is configured.
other=$scratch/other_minor
mkdir -p "$other/lib" "$other/include/torch/headeronly" "$other/include/torch/csrc/api/include/torch"
touch "$other/lib/libtorch_cpu.so" "$other/lib/libc10.so" "$other/include/torch/csrc/api/include/torch/torch.h"
printf '#define TORCH_VERSION_%s\n' 'MAJOR 2' 'MINOR 99' 'PATCH 0' >"$other/include/torch/headeronly/version.h"
if Torch_ROOT=$other "$scratch/prefix/bin/first_step" >"$scratch/other.log" 2>&1; then
  echo "run.sh: expected an error of first_step beside LibTorch 2.99" >&2
  exit 1
fi
expect_told other "expected it in Torch_ROOT ($other), found 2.99"
if configure_with_torch component -B "$scratch/torch_other_minor" -DTorch_ROOT="$other" >"$scratch/other.log" 2>&1; then
  echo "run.sh: expected an error of find_package(dsengine) with LibTorch 2.99" >&2
  exit 1
fi
expect_told other "found 2.99.0 in $other/include. Set Torch_ROOT to a LibTorch"

# Two LibTorch in one program are refused, by name.
if configure_with_torch component -B "$scratch/torch_two" -DTorch_ROOT="$torch" -DTorch_DIR="$scratch/torch_other/share/cmake/Torch" \
  >"$scratch/two.log" 2>&1; then
  echo "run.sh: expected an error for two LibTorch" >&2
  exit 1
fi
expect_told two "in $(readlink -f "$scratch")/torch_other, dsengine in $(readlink -f "$torch"): a program can have one"

if configure_with_torch alone -DTorch_ROOT="$torch" >"$scratch/alone.log" 2>&1; then
  for order in before after; do
    configure_with_torch $order $([ $order = after ] || echo -DTorch_ROOT="$torch") >"$scratch/$order.log" 2>&1 ||
      { cat "$scratch/$order.log"; exit 1; }
    cmake --build "$scratch/torch_$order"
    # That package links libtorch_cuda.so too, whose libraries the CPU half of the wheel comes without.
    missing=$(ldd "$scratch/torch_$order/uses_both" | awk '/not found/ { print $1 }' | sort -u)
    if [ -z "$missing" ]; then
      "$scratch/torch_$order/uses_both"
    elif grep -vE '^lib(cu|nv|nccl)' <<<"$missing"; then
      echo "run.sh: find_package(Torch) $order: expected only CUDA's libraries to be missing" >&2
      exit 1
    else
      echo "find_package(Torch) $order dsengine: built; not run, for this LibTorch has no" $missing
    fi
  done
else
  # No CUDA toolkit here. It is to fail for that reason alone.
  expect_told alone "uses CUDA but I cannot find the CUDA libraries"
fi
