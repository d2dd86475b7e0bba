#include "select.cuh"

namespace rmsnorm {

Kernel select_f16(const KernelChoice& choice) {
  return choice.float_params ? select_order<F16, F32>(choice) : select_order<F16, F16>(choice);
}

}  // namespace rmsnorm
