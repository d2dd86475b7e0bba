// The compiled kernels, by their compile-time options.
#pragma once

#include "kernel_args.h"

namespace rmsnorm {

using Kernel = void (*)(KernelArgs);

struct KernelChoice {
  Layout layout;
  bool aligned;       // as in Problem; kMany is for aligned rows alone
  bool float_params;  // scale and bias are float32, whatever x is
  bool before_cast;
  bool bias;
  bool skip;
  bool squares;  // of the kSplit layouts' two kernels, the first
};

Kernel select_f32(const KernelChoice& choice);
Kernel select_f16(const KernelChoice& choice);
Kernel select_bf16(const KernelChoice& choice);

}  // namespace rmsnorm
