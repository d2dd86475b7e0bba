// From run-time options to the kernel that was compiled for them. Included by one file an element type, so that these
// compile side by side.
#pragma once

#include "kernels.cuh"
#include "select.h"

namespace rmsnorm {

template <class V>
Kernel kernel_of(Layout layout) {
  constexpr int kVec = 16 / V::T::kBytes;
  switch (layout) {
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
  }
  return nullptr;
}

template <class T, class U, ScaleOrder ORDER>
Kernel select_options(const KernelChoice& choice) {
  if (choice.bias) {
    return choice.skip ? kernel_of<Variant<T, U, ORDER, true, true>>(choice.layout)
                       : kernel_of<Variant<T, U, ORDER, true, false>>(choice.layout);
  }
  return choice.skip ? kernel_of<Variant<T, U, ORDER, false, true>>(choice.layout)
                     : kernel_of<Variant<T, U, ORDER, false, false>>(choice.layout);
}

template <class T, class U>
Kernel select_order(const KernelChoice& choice) {
  return choice.before_cast ? select_options<T, U, ScaleOrder::kBeforeCast>(choice)
                            : select_options<T, U, ScaleOrder::kAfterCast>(choice);
}

}  // namespace rmsnorm
