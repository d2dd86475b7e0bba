#include "select.cuh"

namespace rmsnorm {

Kernel select_bf16(const KernelChoice& choice) {
  return choice.float_params ? select_order<BF16, F32>(choice) : select_order<BF16, BF16>(choice);
}

}  // namespace rmsnorm
