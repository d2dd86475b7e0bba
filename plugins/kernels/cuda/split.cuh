// A row split over independent blocks, for few rows so long that one block or cluster would leave the device idle. Two
// kernels, the second after the first in the stream: squares_kernel leaves each slice's sum of squares in the
// workspace, and finish_kernel adds up its row's, always in the same order, and writes the slice. It finds x, or with a
// residual the sum, in the second-level cache where the rows fit there.
#pragma once

#include "tensors.cuh"

namespace rmsnorm {

// What a block has to do: `vectors` of `row` from `first` on. A row's first slice has its single elements too.
struct Slice {
  int64_t row;
  int64_t first;
  int vectors;
  Grid grid;
};

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Slice slice_of(const KernelArgs& args) {
  Slice slice;
  const int block = static_cast<int>(blockIdx.x);
  slice.row = block / args.slices;
  slice.first = (block % args.slices) * args.slice_vectors;
  slice.grid = grid_of<V, VEC, ALIGNED>(args, slice.row);
  const int64_t left = slice.grid.vectors - slice.first;
  slice.vectors = static_cast<int>(left < args.slice_vectors ? left : args.slice_vectors);
  return slice;
}

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Single<typename V::T> load_single_of(const Slice& slice, const KernelArgs& args, const Place& place,
                                                    Site site) {
  if (slice.first > 0) return Single<typename V::T>{};
  return load_single<V, VEC, ALIGNED>(args, slice.grid, place, slice.row, site);
}

template <class T, bool SKIP, bool ALIGNED>
__global__ void __launch_bounds__(kSplitThreads, 2) squares_kernel(const __grid_constant__ KernelArgs args) {
  using V = Variant<T, T, ScaleOrder::kAfterCast, false, SKIP>;
  constexpr int kVec = 16 / T::kBytes;
  constexpr int kU = kUnroll;
  const Place place = place_of(args);
  const Slice slice = slice_of<V, kVec, ALIGNED>(args);
  wait_for_previous_kernel();
  let_next_kernel_start();

  Single<T> single = load_single_of<V, kVec, ALIGNED>(slice, args, place, Site::kX);
  float total = 0.0f;
  for (int done = 0; done < slice.vectors; done += kU * place.stride) {
    Pack<T, kVec> x[kU];
    const RowAt at = row_at<V>(args, slice.row, slice.grid.head + (slice.first + done) * kVec);
    read_vectors<V, kVec, kU, ALIGNED>(x, at, place, slice.vectors - done);
#pragma unroll
    for (int i = 0; i < kU; ++i) total = squares<T, kVec>(x[i], total);
  }
  total = row_sum(square_single<V>(single, args, slice.row, total), args, place, 0);
  if (place.lane == 0) {
    store_global<4>(args.partials + 4 * int64_t{blockIdx.x}, Bits<4>{{float_to_bits(total)}}, Site::kPartials);
  }
}

// args.x is what squares_kernel squared: x, or with a residual the sum.
template <class V, bool ALIGNED>
__global__ void __launch_bounds__(kSplitThreads, 2) finish_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename V::T;
  using U = typename V::U;
  constexpr int kVec = 16 / T::kBytes;
  constexpr int kU = kWriteUnroll<V>;
  const Place place = place_of(args);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const Slice slice = slice_of<V, kVec, ALIGNED>(args);
  Pack<T, kVec> x[kU];
  Pack<U, kVec> scale[kU];
  RowAt at;
  int64_t element;
  const auto load = [&](int done) {
    element = slice.grid.head + (slice.first + done) * kVec;
    at = row_at<V>(args, slice.row, element);
    load_vectors<T, kVec, kU, ALIGNED>(x, at.x, place, slice.vectors - done, Site::kXAgain);
    load_parameter<U, kVec, kU, ALIGNED>(scale, scale_of(args), element, place, slice.vectors - done, Site::kScale);
  };
  // These are on their way while the sums are added up.
  load(0);
  const Single<T> single = load_single_of<V, kVec, ALIGNED>(slice, args, place, Site::kXAgain);
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
    const LoadedBias<V, kVec, ALIGNED> bias{args, element};
    store_outputs<V, kVec, kU, ALIGNED>(at.y, x, scale, bias, factor, args, place, slice.vectors - done);
  }
  store_single<V>(single, args, slice.row, factor);
}

}  // namespace rmsnorm
