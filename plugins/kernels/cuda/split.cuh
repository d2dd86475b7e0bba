// A row split over independent blocks, for few rows so long that one block or cluster would leave the device idle. Two
// kernels, the second after the first in the stream: squares_kernel leaves each slice's sum of squares in the
// workspace, and finish_kernel adds up its row's, always in the same order, and writes the slice. It finds x, or with a
// residual the sum, in the second-level cache where the rows fit there.
#pragma once

#include "kernels.cuh"

namespace rmsnorm {

// What a block has to do: `vectors` of `row` from `first` on.
struct Slice {
  int64_t row;
  int64_t first;
  int vectors;
};

RMSNORM_DEVICE Slice slice_of(const KernelArgs& args) {
  Slice slice;
  const int block = static_cast<int>(blockIdx.x);
  slice.row = block / args.slices;
  slice.first = (block % args.slices) * args.slice_vectors;
  const int64_t left = args.vectors - slice.first;
  slice.vectors = static_cast<int>(left < args.slice_vectors ? left : args.slice_vectors);
  return slice;
}

template <class T, bool SKIP, int VEC>
__global__ void __launch_bounds__(kSplitThreads, 2) squares_kernel(const __grid_constant__ KernelArgs args) {
  constexpr int kBytes = VEC * T::kBytes;
  constexpr int kU = kSplitUnroll;
  const Place place = place_of(args);
  const Slice slice = slice_of(args);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int64_t offset = slice.first * kBytes;
  const char* x_at = args.x + slice.row * args.x_step + offset;
  const char* skip_at = SKIP ? args.skip + slice.row * args.skip_step + offset : nullptr;
  char* sum_at = SKIP ? args.sum + slice.row * args.sum_step + offset : nullptr;
  const int turn_vectors = kU * place.stride;
  float total = 0.0f;
  for (int left = slice.vectors; left > 0; left -= turn_vectors) {
    Pack<T, VEC> x[kU];
    load_row<T, VEC, kU>(x, x_at, place, left, Site::kX);
    if constexpr (SKIP) {
      Pack<T, VEC> skip[kU];
      load_row<T, VEC, kU>(skip, skip_at, place, left, Site::kSkip);
#pragma unroll
      for (int i = 0; i < kU; ++i) x[i] = summed<T, VEC>(x[i], skip[i]);
      store_row<T, VEC, kU>(sum_at, x, place, left);
      skip_at += int64_t{turn_vectors} * kBytes;
      sum_at += int64_t{turn_vectors} * kBytes;
    }
#pragma unroll
    for (int i = 0; i < kU; ++i) total = squares<T, VEC>(x[i], total);
    x_at += int64_t{turn_vectors} * kBytes;
  }
  total = row_sum(total, args, place, 0);
  if (place.lane == 0) {
    store_global<4>(args.partials + 4 * int64_t{blockIdx.x}, Bits<4>{{float_to_bits(total)}}, Site::kPartials);
  }
}

// args.x is what squares_kernel squared: x, or with a residual the sum.
template <class V, int VEC>
__global__ void __launch_bounds__(kSplitThreads, 2) finish_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename V::T;
  using U = typename V::U;
  using Y = typename OutputOf<V>::Type;
  constexpr int kBytes = VEC * T::kBytes;
  constexpr int kU = kSplitUnroll;
  const Place place = place_of(args);
  const Slice slice = slice_of(args);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const bool one_scale = args.scale_is_one_element != 0;
  const bool one_bias = args.bias_is_one_element != 0;
  const float scale0 = everywhere<U>(args.scale, one_scale, 1.0f, Site::kScale);
  const float bias0 = V::kBias ? everywhere<U>(args.bias, one_bias, 0.0f, Site::kBias) : 0.0f;
  const char* const x_at = args.x + slice.row * args.x_step + slice.first * kBytes;
  char* const y_at = args.y + slice.row * args.y_step + slice.first * (VEC * Y::kBytes);
  Pack<T, VEC> x[kU];
  Pack<U, VEC> scale[kU];
  const auto load = [&](int done) {
    load_row<T, VEC, kU>(x, x_at + int64_t{done} * kBytes, place, slice.vectors - done, Site::kXAgain);
#pragma unroll
    for (int i = 0; i < kU; ++i) {
      const int column = done + place.column0 + i * place.stride;
      if (column < slice.vectors) {
        scale[i] = parameter_at<U, VEC>(args.scale, one_scale, scale0, slice.first + column, Site::kScale);
      }
    }
  };
  // These are on their way while the sums are added up.
  load(0);
  float total = 0.0f;
  const char* const partials = args.partials + 4 * slice.row * args.slices;
#pragma unroll
  for (int i = 0; i < kMostSplitBlocks / kSplitThreads; ++i) {
    const int of = place.lane + i * kSplitThreads;
    if (of < args.slices) total += bits_to_float(load_global<4>(partials + 4 * of, Site::kPartials).word[0]);
  }
  const float factor = factor_of(row_sum(total, args, place, 0), args);
  for (int done = 0; done < slice.vectors; done += kU * place.stride) {
    if (done > 0) load(done);
#pragma unroll
    for (int i = 0; i < kU; ++i) {
      const int column = done + place.column0 + i * place.stride;
      if (column < slice.vectors) {
        Pack<U, VEC> bias{};
        if constexpr (V::kBias) {
          bias = parameter_at<U, VEC>(args.bias, one_bias, bias0, slice.first + column, Site::kBias);
        }
        store_output<V, VEC>(y_at + int64_t{column} * (VEC * Y::kBytes), x[i], scale[i], bias, factor, args);
      }
    }
  }
}

}  // namespace rmsnorm
