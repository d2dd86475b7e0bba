// From run-time options to the kernel that was compiled for them. Included by one file an element type, so that these
// compile side by side.
#pragma once

#include "kernels.cuh"
#include "select.h"
#include "split.cuh"

namespace rmsnorm {

// The two kernels of a split norm; only the first has to do with the residual.
template <class V, bool ALIGNED>
Kernel split_kernel_of(bool squares) {
  if (squares) return squares_kernel<typename V::T, V::kSkip, ALIGNED>;
  return finish_kernel<Variant<typename V::T, typename V::U, V::kOrder, V::kBias, false>, ALIGNED>;
}

template <class V, bool ALIGNED>
Kernel layout_of(const KernelChoice& choice) {
  switch (choice.layout) {
    case Layout::kMany:
      return resident_kernel<V, 1, kManyRows, true>;
    case Layout::kThin:
      return resident_kernel<V, 1, 1, ALIGNED>;
    case Layout::kThick:
      return resident_kernel<V, kThickVectors, 1, ALIGNED>;
    case Layout::kLong:
      return long_kernel<V, ALIGNED>;
    case Layout::kSplit:
      return split_kernel_of<V, ALIGNED>(choice.squares);
  }
  return nullptr;
}

template <class V>
Kernel kernel_of(const KernelChoice& choice) {
  return choice.aligned ? layout_of<V, true>(choice) : layout_of<V, false>(choice);
}

template <class T, class U, ScaleOrder ORDER>
Kernel select_options(const KernelChoice& choice) {
  if (choice.bias) {
    return choice.skip ? kernel_of<Variant<T, U, ORDER, true, true>>(choice)
                       : kernel_of<Variant<T, U, ORDER, true, false>>(choice);
  }
  return choice.skip ? kernel_of<Variant<T, U, ORDER, false, true>>(choice)
                     : kernel_of<Variant<T, U, ORDER, false, false>>(choice);
}

template <class T, class U>
Kernel select_order(const KernelChoice& choice) {
  return choice.before_cast ? select_options<T, U, ScaleOrder::kBeforeCast>(choice)
                            : select_options<T, U, ScaleOrder::kAfterCast>(choice);
}

}  // namespace rmsnorm
