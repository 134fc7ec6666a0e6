# make train    a GPT trains on real text, on each GPU or on two ranks of the CPU, through ds-launch
# make test     builds everything and runs all tests
# make build    builds into build/release (binaries in build/release/bin); make benchmarks builds what measures
# make package  builds Debian packages and a tarball in build/package/packages
# make clean    removes build/ (keeps the installed LibTorch in .deps/)
# All set-up is done by scripts/setup, which installs only what is missing; servers that tests start, only for make test.
PRESET ?= release
# TORCH=VERSION takes another LibTorch than the default of scripts/setup, and a build folder of its own.
TORCH ?=
BUILD := build/$(PRESET)$(if $(TORCH),-torch-$(TORCH))
SETUP := scripts/setup $(if $(TORCH),--torch $(TORCH))
# The compiler of a new build folder: CXX=... where it is given, else the newest clang from 16 on, which reads LibTorch's
# headers in half of GCC's time, else the system's. Sanitizers, packages and other presets keep the system's or name theirs.
ifneq ($(filter command environment,$(firstword $(origin CXX))),)
COMPILER := $(CXX)
else ifneq ($(filter release dev debug,$(PRESET)),)
COMPILER = $(shell for version in 22 21 20 19 18 17 16; do command -v clang++-$$version && break; done)
endif
# A rank for each GPU; two on a machine without one.
TRAIN_RANKS := $(if $(wildcard /dev/nvidia[0-9]* /dev/dxg),,--num_procs 2)
# ccache has to be told that a precompiled header may be reused.
export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
# A miss costs no second run of the preprocessor.
export CCACHE_DEPEND := 1
# Another checkout of the same sources finds them compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

help:
	@sed -n '1,6s/^# //p' Makefile

setup:
	@$(SETUP)

$(BUILD)/build.ninja: | setup
	@cmake --preset $(PRESET) -B $(BUILD) -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
	  $(addprefix -DCMAKE_CXX_COMPILER=,$(COMPILER)) $(if $(TORCH),-DTorch_ROOT=$$(echo $(CURDIR)/.deps/torch-$(TORCH)/lib/python3*/site-packages/torch)) $(CMAKE_ARGS)

build: setup $(BUILD)/build.ninja
	@cmake --build $(BUILD) $(if $(TARGETS),--target $(TARGETS))

train:
	@$(MAKE) --no-print-directory build TARGETS="gpt ds-launch"
	@$(BUILD)/bin/ds-launch $(TRAIN_RANKS) $(BUILD)/bin/gpt --deepspeed_config configs/zero2.json $(TRAIN_ARGS)

test:
	@$(SETUP) test
	@$(MAKE) --no-print-directory build
	@scripts/run_tests $(notdir $(BUILD))

benchmarks:
	@$(SETUP) benchmarks
	@$(MAKE) --no-print-directory build TARGETS=ds_benchmarks

package:
	@$(MAKE) --no-print-directory build PRESET=package TARGETS=ds_packages

clean:
	@rm -rf build

.PHONY: help setup build train test benchmarks package clean
