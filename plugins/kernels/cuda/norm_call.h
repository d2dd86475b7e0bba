// From the C header's arguments to a launch: what is the same on a device and in the emulator.
#pragma once

#include "../rms_norm.h"
#include "launch.h"
#include "select.h"

namespace rmsnorm {

Problem problem_of(const rmsnorm_args& args);
KernelChoice choice_of(const rmsnorm_args& args, Layout layout);
KernelArgs kernel_args_of(const rmsnorm_args& args, const Problem& problem, const Launch& launch);
Kernel select_kernel(const rmsnorm_args& args, Layout layout);

}  // namespace rmsnorm
