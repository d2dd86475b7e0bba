// The two RMSNorm kernels. Both read x once, square and sum it, combine the sums of all threads that share a row, and
// write the normalized row from what they kept:
//   resident_kernel  keeps the row in registers: lanes of a warp, a warp, a block or a cluster of blocks a row;
//   long_kernel      keeps it in the shared memory of a block or cluster, and reads again only what does not fit there.
#pragma once

#include "kernel_args.h"
#include "numbers.cuh"

namespace rmsnorm {

enum class ScaleOrder { kAfterCast, kBeforeCast };

// The compile-time options. T: x, skip, sum. U: scale, bias.
template <class T_, class U_, ScaleOrder ORDER, bool BIAS, bool SKIP>
struct Variant {
  using T = T_;
  using U = U_;
  static constexpr ScaleOrder kOrder = ORDER;
  static constexpr bool kBias = BIAS;
  static constexpr bool kSkip = SKIP;
};

template <class A, class B>
struct Wider {
  using Type = A;
};
template <class A>
struct Wider<A, F32> {
  using Type = F32;
};

// y's type.
template <class V>
struct OutputOf {
  using Type = typename Wider<typename V::T, typename V::U>::Type;
};
template <class T, class U, bool BIAS, bool SKIP>
struct OutputOf<Variant<T, U, ScaleOrder::kBeforeCast, BIAS, SKIP>> {
  using Type = T;
};

// Where a thread stands: which of the block's rows, which of the row's threads.
struct Place {
  int lane;     // among the row's threads in this block
  int slot;     // which of the block's rows
  int rank;     // of the block in its cluster
  int stride;   // threads of the whole cluster that share the row
  int column0;  // the row's first vector that is this thread's
};

RMSNORM_DEVICE Place place_of(const KernelArgs& args) {
  Place place;
  const int thread = static_cast<int>(threadIdx.x);
  place.slot = thread >> args.lane_shift;
  place.lane = thread & static_cast<int>((1u << args.lane_shift) - 1u);
  place.rank = static_cast<int>(blockIdx.x) & (args.cluster - 1);
  place.stride = args.lanes << args.cluster_shift;
  place.column0 = place.rank * args.lanes + place.lane;
  return place;
}

RMSNORM_DEVICE float warp_sum(float value, int lanes) {
  for (int mask = lanes >> 1; mask > 0; mask >>= 1) value += shuffle_xor(value, mask);
  return value;
}

// The sum over all threads that share a row, in every one of them. `turn` counts the rows this block has done.
RMSNORM_DEVICE float row_sum(float value, const KernelArgs& args, const Place& place, int turn) {
  if (args.lanes <= 32) return warp_sum(value, args.lanes);
  value = warp_sum(value, 32);
  const int warps = args.lanes >> 5;
  const int warp = place.lane >> 5;
  const int lane = place.lane & 31;
  const int base = (turn & 1) * kPartialsPerRow * 4;
  if (args.cluster == 1) {
    if (lane == 0) store_shared<4>(base + 4 * warp, Bits<4>{{float_to_bits(value)}});
    block_barrier();
  } else {
    // A block's shared memory can be written to only once the block has started.
    if (turn == 0) cluster_wait();
    if (lane < args.cluster) store_shared_of(lane, base + 4 * (place.rank * warps + warp), value);
    cluster_arrive();
    cluster_wait();
  }
  float total = 0.0f;
  const int partials = warps << args.cluster_shift;
#pragma unroll 1
  for (int i = lane; i < partials; i += 32) total += bits_to_float(load_shared<4>(base + 4 * i).word[0]);
  return warp_sum(total, 32);
}

// What a row's elements are multiplied by: n = x * factor, or x * kLift * factor where the launch says that eps is
// tiny: a reciprocal of a subnormal overflows where the quotient need not, so the divisor is lifted out of that range,
// and x with it (if that overflows, so does the quotient).
constexpr float kLift = 0x1p64f;

RMSNORM_DEVICE float factor_of(float sum, const KernelArgs& args) {
  const float mean = multiply(sum, args.reciprocal_width);
  float root;
  if (args.eps_mode == EpsMode::kInside) {
    root = square_root(add(mean, args.eps));
  } else {
    root = square_root(mean);
    if (args.eps_mode == EpsMode::kOutside) {
      root = add(root, args.eps);
    } else if (root < args.eps) {  // not fmaxf: a NaN stays
      root = args.eps;
    }
  }
  return reciprocal(args.eps_is_tiny != 0 ? multiply(root, kLift) : root);
}

// y of one element.
template <class V>
RMSNORM_DEVICE float output_of(float normalized, float scale, float bias) {
  using Y = typename OutputOf<V>::Type;
  if constexpr (V::kOrder == ScaleOrder::kBeforeCast) {
    const float product = multiply(normalized, scale);
    return V::kBias ? add(product, bias) : product;
  } else {
    const float product = multiply(round_to<typename V::T>(normalized), scale);
    return V::kBias ? add(round_to<Y>(product), bias) : product;
  }
}

template <class U, int VEC>
RMSNORM_DEVICE Pack<U, VEC> filled(float value) {
  float values[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = value;
  return pack<U, VEC>(values);
}

// The value a one-element or absent parameter has everywhere.
template <class U>
RMSNORM_DEVICE float everywhere(const char* from, bool one_element, float absent, Site site) {
  if (from == nullptr || !one_element) return absent;
  return U::up(load_global<U::kBytes>(from, site).word[0]);
}

template <class U, int VEC>
RMSNORM_DEVICE Pack<U, VEC> parameter_at(const char* from, bool one_element, float value, int64_t column, Site site) {
  if (from == nullptr || one_element) return filled<U, VEC>(value);
  return load_global<VEC * U::kBytes>(from + column * (VEC * U::kBytes), site);
}

// x + skip rounded to T.
template <class T, int VEC>
RMSNORM_DEVICE Pack<T, VEC> summed(const Pack<T, VEC>& x, const Pack<T, VEC>& skip) {
  float a[VEC];
  float b[VEC];
  unpack<T, VEC>(x, a);
  unpack<T, VEC>(skip, b);
#pragma unroll
  for (int i = 0; i < VEC; ++i) a[i] = add(a[i], b[i]);
  return pack<T, VEC>(a);
}

template <class T, int VEC>
RMSNORM_DEVICE float squares(const Pack<T, VEC>& x, float total) {
  float values[VEC];
  unpack<T, VEC>(x, values);
#pragma unroll
  for (int i = 0; i < VEC; ++i) total = multiply_add(values[i], values[i], total);
  return total;
}

// Whether a product of two elements can be had in their own type, two at a time: it is rounded once either way.
template <class V, int VEC>
constexpr bool kPaired = VEC > 1 && V::T::kBytes == 2 && V::U::kBytes == 2 && V::kOrder == ScaleOrder::kAfterCast;

template <class V, int VEC>
RMSNORM_DEVICE void store_output(char* to, const Pack<typename V::T, VEC>& x, const Pack<typename V::U, VEC>& scale,
                                 const Pack<typename V::U, VEC>& bias, float factor, const KernelArgs& args) {
  using T = typename V::T;
  using Y = typename OutputOf<V>::Type;
  float values[VEC];
  unpack<T, VEC>(x, values);
  if (args.eps_is_tiny != 0) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = multiply(values[i], kLift);
  }
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = multiply(values[i], factor);
  if constexpr (kPaired<V, VEC>) {
    Pack<T, VEC> out = pack<T, VEC>(values);
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) {
      out.word[i] = T::multiply2(out.word[i], scale.word[i]);
      if constexpr (V::kBias) out.word[i] = T::add2(out.word[i], bias.word[i]);
    }
    store_global<VEC * T::kBytes>(to, out, Site::kY);
  } else {
    float scales[VEC];
    float biases[VEC] = {};
    unpack<typename V::U, VEC>(scale, scales);
    if constexpr (V::kBias) unpack<typename V::U, VEC>(bias, biases);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = output_of<V>(values[i], scales[i], biases[i]);
    store_global<VEC * Y::kBytes>(to, pack<Y, VEC>(values), Site::kY);
  }
}

// A thread's N vectors of a row; what lies beyond the row is zero and adds nothing to the sum of squares.
template <class T, int VEC, int N>
RMSNORM_DEVICE void load_row(Pack<T, VEC> (&out)[N], const char* row, const Place& place, int vectors, Site site) {
  constexpr int kBytes = VEC * T::kBytes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    out[i] = Pack<T, VEC>{};
    if (column < vectors) out[i] = load_global<kBytes>(row + int64_t{column} * kBytes, site);
  }
}

template <class T, int VEC, int N>
RMSNORM_DEVICE void store_row(char* row, const Pack<T, VEC> (&in)[N], const Place& place, int vectors) {
  constexpr int kBytes = VEC * T::kBytes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    if (column < vectors) store_global<kBytes>(row + int64_t{column} * kBytes, in[i], Site::kSum);
  }
}

// ROWS rows at once, each with N vectors of VEC elements a thread, all in registers. The parameters are loaded once,
// before the first row's reduction, and serve all rows of the block. ROWS > 1 needs rows that fit in a warp.
template <class V, int VEC, int N, int ROWS>
__global__ void __launch_bounds__(kMaxThreads, 1) resident_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename V::T;
  using U = typename V::U;
  using Y = typename OutputOf<V>::Type;
  const Place place = place_of(args);
  const int vectors = static_cast<int>(args.vectors);
  if (args.cluster > 1) cluster_arrive_started();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const bool one_scale = args.scale_is_one_element != 0;
  const bool one_bias = args.bias_is_one_element != 0;
  const float scale0 = everywhere<U>(args.scale, one_scale, 1.0f, Site::kScale);
  const float bias0 = V::kBias ? everywhere<U>(args.bias, one_bias, 0.0f, Site::kBias) : 0.0f;
  Pack<U, VEC> scale[N];
  Pack<U, VEC> bias[V::kBias ? N : 1] = {};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    if (column < vectors) {
      scale[i] = parameter_at<U, VEC>(args.scale, one_scale, scale0, column, Site::kScale);
      if constexpr (V::kBias) bias[i] = parameter_at<U, VEC>(args.bias, one_bias, bias0, column, Site::kBias);
    }
  }

  const int slots = args.lanes <= 32 ? static_cast<int>(blockDim.x) >> args.lane_shift : 1;
  const int64_t step = static_cast<int64_t>(gridDim.x >> args.cluster_shift) * (slots * ROWS);
  int64_t first = static_cast<int64_t>(blockIdx.x >> args.cluster_shift) * (slots * ROWS);
  // The loop is the same for all threads of a block, so that barriers and shuffles meet; `limit` guards the memory.
  for (int turn = 0; first < args.rows; first += step, ++turn) {
    const int64_t row0 = first + place.slot;
    Pack<T, VEC> x[ROWS][N];
    int limit[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t row = row0 + r * slots;
      limit[r] = row < args.rows ? vectors : 0;
      load_row<T, VEC, N>(x[r], args.x + row * args.x_step, place, limit[r], Site::kX);
    }
    if constexpr (V::kSkip) {
      Pack<T, VEC> skip[ROWS][N];
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        load_row<T, VEC, N>(skip[r], args.skip + (row0 + r * slots) * args.skip_step, place, limit[r], Site::kSkip);
      }
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < N; ++i) x[r][i] = summed<T, VEC>(x[r][i], skip[r][i]);
        if (args.sum != nullptr) {
          store_row<T, VEC, N>(args.sum + (row0 + r * slots) * args.sum_step, x[r], place, limit[r]);
        }
      }
    }
    float total[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      total[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) total[r] = squares<T, VEC>(x[r][i], total[r]);
    }
    if constexpr (ROWS == 1) {
      total[0] = row_sum(total[0], args, place, turn);
    } else {
      for (int mask = args.lanes >> 1; mask > 0; mask >>= 1) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] += shuffle_xor(total[r], mask);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const float factor = factor_of(total[r], args);
      char* const y_row = args.y + (row0 + r * slots) * args.y_step;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int column = place.column0 + i * place.stride;
        if (column < limit[r]) {
          store_output<V, VEC>(y_row + int64_t{column} * (VEC * Y::kBytes), x[r][i], scale[i], bias[V::kBias ? i : 0],
                               factor, args);
        }
      }
    }
  }
}

// The k-th vector of a thread is at column0 + k * stride; the first `kept` of them stay in shared memory, each where
// only its own thread touches it, so that no barrier is needed for them.
template <class V, int VEC>
__global__ void __launch_bounds__(kMaxThreads, 1) long_kernel(const __grid_constant__ KernelArgs args) {
  using T = typename V::T;
  using U = typename V::U;
  using Y = typename OutputOf<V>::Type;
  constexpr int kBytes = VEC * T::kBytes;
  constexpr int kU = kLongUnroll;
  const Place place = place_of(args);
  if (args.cluster > 1) cluster_arrive_started();
  wait_for_previous_kernel();
  let_next_kernel_start();

  const bool one_scale = args.scale_is_one_element != 0;
  const bool one_bias = args.bias_is_one_element != 0;
  const float scale0 = everywhere<U>(args.scale, one_scale, 1.0f, Site::kScale);
  const float bias0 = V::kBias ? everywhere<U>(args.bias, one_bias, 0.0f, Site::kBias) : 0.0f;
  const int shelf = kPartialBytes + place.lane * kBytes;
  const int64_t step = gridDim.x >> args.cluster_shift;
  int64_t row = blockIdx.x >> args.cluster_shift;
  for (int turn = 0; row < args.rows; row += step, ++turn) {
    const char* const x_row = args.x + row * args.x_step;
    const char* const skip_row = V::kSkip ? args.skip + row * args.skip_step : nullptr;
    char* const sum_row = args.sum == nullptr ? nullptr : args.sum + row * args.sum_step;
    float total = 0.0f;
    for (int k = 0; place.column0 + int64_t{k} * place.stride < args.vectors; k += kU) {
      Pack<T, VEC> x[kU];
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        const int64_t column = place.column0 + int64_t{k + i} * place.stride;
        x[i] = Pack<T, VEC>{};
        if (column < args.vectors) x[i] = load_global<kBytes>(x_row + column * kBytes, Site::kX);
      }
      if constexpr (V::kSkip) {
        Pack<T, VEC> skip[kU];
#pragma unroll
        for (int i = 0; i < kU; ++i) {
          const int64_t column = place.column0 + int64_t{k + i} * place.stride;
          skip[i] = Pack<T, VEC>{};
          if (column < args.vectors) skip[i] = load_global<kBytes>(skip_row + column * kBytes, Site::kSkip);
        }
#pragma unroll
        for (int i = 0; i < kU; ++i) {
          const int64_t column = place.column0 + int64_t{k + i} * place.stride;
          x[i] = summed<T, VEC>(x[i], skip[i]);
          if (sum_row != nullptr && column < args.vectors) {
            store_global<kBytes>(sum_row + column * kBytes, x[i], Site::kSum);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        total = squares<T, VEC>(x[i], total);
        if (k + i < args.kept) store_shared<kBytes>(shelf + (k + i) * args.lanes * kBytes, x[i]);
      }
    }

    // The first of the scale is on its way while the sums are combined.
    Pack<U, VEC> scale[kU];
    const auto load_scale = [&](int k) {
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        const int64_t column = place.column0 + int64_t{k + i} * place.stride;
        if (column < args.vectors) {
          scale[i] = parameter_at<U, VEC>(args.scale, one_scale, scale0, column, Site::kScale);
        }
      }
    };
    load_scale(0);
    const float factor = factor_of(row_sum(total, args, place, turn), args);
    char* const y_row = args.y + row * args.y_step;
    for (int k = 0; place.column0 + int64_t{k} * place.stride < args.vectors; k += kU) {
      Pack<T, VEC> x[kU];
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        const int64_t column = place.column0 + int64_t{k + i} * place.stride;
        x[i] = Pack<T, VEC>{};
        if (column >= args.vectors) continue;
        if (k + i < args.kept) {
          x[i] = load_shared<kBytes>(shelf + (k + i) * args.lanes * kBytes);
        } else if (V::kSkip && sum_row != nullptr) {
          x[i] = load_global<kBytes>(sum_row + column * kBytes, Site::kXAgain);
        } else {
          x[i] = load_global<kBytes>(x_row + column * kBytes, Site::kXAgain);
          if constexpr (V::kSkip) {
            x[i] = summed<T, VEC>(x[i], load_global<kBytes>(skip_row + column * kBytes, Site::kSkipAgain));
          }
        }
      }
      if (k > 0) load_scale(k);
#pragma unroll
      for (int i = 0; i < kU; ++i) {
        const int64_t column = place.column0 + int64_t{k + i} * place.stride;
        if (column < args.vectors) {
          Pack<U, VEC> bias{};
          if constexpr (V::kBias) bias = parameter_at<U, VEC>(args.bias, one_bias, bias0, column, Site::kBias);
          store_output<V, VEC>(y_row + column * (VEC * Y::kBytes), x[i], scale[i], bias, factor, args);
        }
      }
    }
  }
}

}  // namespace rmsnorm
