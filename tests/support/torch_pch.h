// Precompiled for all tests that use LibTorch. It only saves time; every source includes what it uses.
#pragma once

#include <tests/support/plain_pch.h>
#include <torch/torch.h>
