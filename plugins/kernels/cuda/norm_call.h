// From the C header's arguments to a launch: what is the same on a device and in the emulator.
#pragma once

#include "../rms_norm.h"
#include "launch.h"
#include "select.h"

namespace rmsnorm {

Problem problem_of(const rmsnorm_args& args);

// One kernel of a launch, on the launch's grid.
struct Step {
  Kernel kernel;
  KernelArgs args;
};

// The kernels to queue one after the other.
struct Steps {
  int count;
  Step step[2];
};

Steps steps_of(const rmsnorm_args& args, const Problem& problem, const Launch& launch);

}  // namespace rmsnorm
