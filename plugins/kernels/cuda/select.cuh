// From run-time options to the kernel that was compiled for them. Included by one file an element type, so that these
// compile side by side.
#pragma once

#include "select.h"
#include "split.cuh"

namespace rmsnorm {

// The two kernels of a split norm; only the first has to do with the residual.
template <class V, int VEC>
Kernel split_kernel_of(bool squares) {
  if (squares) return squares_kernel<typename V::T, V::kSkip, VEC>;
  return finish_kernel<Variant<typename V::T, typename V::U, V::kOrder, V::kBias, false>, VEC>;
}

template <class V>
Kernel kernel_of(const KernelChoice& choice) {
  constexpr int kVec = 16 / V::T::kBytes;
  switch (choice.layout) {
    case Layout::kMany:
      return resident_kernel<V, kVec, 1, kManyRows>;
    case Layout::kThin:
      return resident_kernel<V, kVec, 1, 1>;
    case Layout::kThick:
      return resident_kernel<V, kVec, kThickVectors, 1>;
    case Layout::kSingle:
      return resident_kernel<V, 1, kSingleElements, 1>;
    case Layout::kLong:
      return long_kernel<V, kVec>;
    case Layout::kLongSingle:
      return long_kernel<V, 1>;
    case Layout::kSplit:
      return split_kernel_of<V, kVec>(choice.squares);
    case Layout::kSplitSingle:
      return split_kernel_of<V, 1>(choice.squares);
  }
  return nullptr;
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
