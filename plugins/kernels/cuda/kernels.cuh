// The two RMSNorm kernels. Both read x once, square and sum it, combine the sums of all threads that share a row, and
// write the normalized row from what they kept:
//   resident_kernel  keeps the row in registers: lanes of a warp, a warp, a block or a cluster of blocks a row;
//   long_kernel      keeps it in the shared memory of a block or cluster, and reads again only what does not fit there.
#pragma once

#include "tensors.cuh"

namespace rmsnorm {

// ROWS rows at once, each with N vectors a thread, all in registers. The parameters of aligned rows are loaded once,
// before the first row's reduction, and serve all rows of the block. ROWS > 1 needs aligned rows that fit in a warp.
template <class V, int N, int ROWS, bool ALIGNED>
__global__ void __launch_bounds__(kMaxThreads, 1) resident_kernel(const __grid_constant__ KernelArgs args) {
  static_assert(ALIGNED || ROWS == 1, "single elements are kept of one row");
  using T = typename V::T;
  using U = typename V::U;
  constexpr int kVec = 16 / T::kBytes;
  const Place place = place_of(args);
  if (args.cluster > 1) cluster_arrive_started();
  wait_for_previous_kernel();
  let_next_kernel_start();

  Pack<U, kVec> scale[N];
  Pack<U, kVec> bias[V::kBias ? N : 1] = {};
  if constexpr (ALIGNED) {
    const int vectors = static_cast<int>(args.width / kVec);
    load_parameter<U, kVec, N, true>(scale, scale_of(args), 0, place, vectors, Site::kScale);
    if constexpr (V::kBias) load_parameter<U, kVec, N, true>(bias, bias_of(args), 0, place, vectors, Site::kBias);
  }
  const int slots = args.lanes <= 32 ? static_cast<int>(blockDim.x) >> args.lane_shift : 1;
  const int64_t step = static_cast<int64_t>(gridDim.x >> args.cluster_shift) * (slots * ROWS);
  int64_t first = static_cast<int64_t>(blockIdx.x >> args.cluster_shift) * (slots * ROWS);
  // The loop is the same for all threads of a block, so that barriers and shuffles meet; `vectors` guards the memory.
  for (int turn = 0; first < args.rows; first += step, ++turn) {
    const int64_t row0 = first + place.slot;
    Pack<T, kVec> x[ROWS][N];
    int vectors[ROWS];
    Grid grid{};
    // Found again where it is needed: pointers to four tensors are more registers than there are to spare.
    const auto at = [&](int r) { return row_at<V>(args, row0 + r * slots, grid.head); };
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      grid = grid_of<V, kVec, ALIGNED>(args, row0 + r * slots);
      vectors[r] = static_cast<int>(grid.vectors);
      load_vectors<T, kVec, N, ALIGNED>(x[r], at(r).x, place, vectors[r], Site::kX);
    }
    Single<T> single = load_single<V, kVec, ALIGNED>(args, grid, place, row0, Site::kX);
    if constexpr (V::kSkip) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) add_vectors<T, kVec, N, ALIGNED>(x[r], at(r).skip, place, vectors[r]);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        if (at(r).sum != nullptr) {
          store_vectors<T, kVec, N, ALIGNED>(at(r).sum, x[r], place, vectors[r], Site::kSum);
        }
      }
    }
    // Not before the residual is added: both at once are more than the registers hold.
    if constexpr (!ALIGNED) {
      load_parameter<U, kVec, N, ALIGNED>(scale, scale_of(args), grid.head, place, vectors[0], Site::kScale);
    }
    float total[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      total[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) total[r] = squares<T, kVec>(x[r][i], total[r]);
    }
    if constexpr (ROWS == 1) {
      total[0] = row_sum(square_single<V>(single, args, row0, total[0]), args, place, turn);
    } else {
      for (int mask = args.lanes >> 1; mask > 0; mask >>= 1) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] += shuffle_xor(total[r], mask);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float factor = factor_of(total[r], args);
      if constexpr (ALIGNED) {
        const auto held = [&](int i, int) { return bias[V::kBias ? i : 0]; };
        store_outputs<V, kVec, N, ALIGNED>(at(r).y, x[r], scale, held, factor, args, place, vectors[r]);
      } else {
        const LoadedBias<V, kVec, ALIGNED> loaded{args, grid.head};
        store_outputs<V, kVec, N, ALIGNED>(at(r).y, x[r], scale, loaded, factor, args, place, vectors[r]);
        store_single<V>(single, args, row0, factor);
      }
    }
  }
}

// The vector `bytes` from where a batch begins, which this thread has read before and not kept. A sum in another phase
// than y's is computed again: the words around one of its vectors are what other threads store.
template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Pack<typename V::T, VEC> read_again(const RowAt& at, int64_t bytes) {
  using T = typename V::T;
  if (V::kSkip && at.sum != nullptr && late_by<ALIGNED>(at.sum) == 0) {
    return load_global<16>(at.sum + bytes, Site::kXAgain);
  }
  const Pack<T, VEC> x = load_vector<T, VEC, ALIGNED>(at.x + bytes, Site::kXAgain);
  if constexpr (!V::kSkip) return x;
  return summed<T, VEC>(x, load_vector<T, VEC, ALIGNED>(at.skip + bytes, Site::kSkipAgain));
}

// A thread's k-th vector is at column0 + k * stride; the first `kept` of them stay in shared memory, each where only
// its own thread touches it, so that no barrier is needed for them.
template <class V, bool ALIGNED>
__global__ void __launch_bounds__(kMaxThreads, 1) long_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename V::T;
  using U = typename V::U;
  constexpr int kVec = 16 / T::kBytes;
  constexpr int kU = kUnroll;
  constexpr int kW = kWriteUnroll<V>;
  const Place place = place_of(args);
  if (args.cluster > 1) cluster_arrive_started();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int vectors_read = kU * place.stride;
  const int vectors_written = kW * place.stride;
  const int shelf = kPartialBytes + place.lane * 16;
  const int64_t step = gridDim.x >> args.cluster_shift;
  int64_t row = blockIdx.x >> args.cluster_shift;
  for (int turn = 0; row < args.rows; row += step, ++turn) {
    const Grid grid = grid_of<V, kVec, ALIGNED>(args, row);
    Single<T> single = load_single<V, kVec, ALIGNED>(args, grid, place, row, Site::kX);
    float total = 0.0f;
    int k = 0;
    for (int64_t done = 0; done < grid.vectors; done += vectors_read, k += kU) {
      Pack<T, kVec> x[kU];
      const RowAt at = row_at<V>(args, row, grid.head + done * kVec);
      read_vectors<V, kVec, kU, ALIGNED>(x, at, place, batch_of(grid.vectors - done, vectors_read));
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        total = squares<T, kVec>(x[i], total);
        if (k + i < args.kept) store_shared<16>(shelf + (k + i) * args.lanes * 16, x[i]);
      }
    }
    total = square_single<V>(single, args, row, total);

    // The first of the scale is on its way while the sums are combined.
    Pack<U, kVec> scale[kW];
    const auto load_scale = [&](int64_t done) {
      load_parameter<U, kVec, kW, ALIGNED>(scale, scale_of(args), grid.head + done * kVec, place,
                                           batch_of(grid.vectors - done, vectors_written), Site::kScale);
    };
    load_scale(0);
    const float factor = factor_of(row_sum(total, args, place, turn), args);
    k = 0;
    for (int64_t done = 0; done < grid.vectors; done += vectors_written, k += kW) {
      Pack<T, kVec> x[kW];
      const int64_t element = grid.head + done * kVec;
      const int vectors = batch_of(grid.vectors - done, vectors_written);
      const RowAt at = row_at<V>(args, row, element);
#pragma unroll
      for (int i = 0; i < kW; ++i) {
        const int column = place.column0 + i * place.stride;
        x[i] = Pack<T, kVec>{};
        if (column >= vectors) continue;
        x[i] = k + i < args.kept ? load_shared<16>(shelf + (k + i) * args.lanes * 16)
                                 : read_again<V, kVec, ALIGNED>(at, int64_t{column} * 16);
      }
      if (done > 0) load_scale(done);
      const LoadedBias<V, kVec, ALIGNED> bias{args, element};
      store_outputs<V, kVec, kW, ALIGNED>(at.y, x, scale, bias, factor, args, place, vectors);
    }
    store_single<V>(single, args, row, factor);
  }
}

}  // namespace rmsnorm
