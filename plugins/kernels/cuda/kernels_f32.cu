#include "select.cuh"

namespace rmsnorm {

// In float32 both scale orders are the same arithmetic.
Kernel select_f32(const KernelChoice& choice) { return select_options<F32, F32, ScaleOrder::kAfterCast>(choice); }

}  // namespace rmsnorm
