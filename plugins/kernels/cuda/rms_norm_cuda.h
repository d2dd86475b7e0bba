// rmsnorm_cuda with a say in the launch, for TensorRT's tactics and for benchmarks.
#pragma once

#include "../rms_norm.h"
#include "launch.h"

namespace rmsnorm {

// The current device, asked once a process and device. False where the CUDA runtime refuses.
bool current_device(Device* device);

rmsnorm_status run_on_cuda(const rmsnorm_args& args, void* stream, Tactic tactic);

}  // namespace rmsnorm
