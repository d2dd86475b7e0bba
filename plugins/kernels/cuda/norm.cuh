// The arithmetic of a norm: its compile-time options, the sum over a row's threads, and y of a vector of x.
#pragma once

#include "kernel_args.h"
#include "rows.cuh"

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

// With one output the row is cut where that is aligned; of two in different phases one is stored element by element.
template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE void store_output(char* to, const Pack<typename V::T, VEC>& x, const Pack<typename V::U, VEC>& scale,
                                 const Pack<typename V::U, VEC>& bias, float factor, const KernelArgs& args) {
  using T = typename V::T;
  using Y = typename OutputOf<V>::Type;
  constexpr bool kAligned = ALIGNED || !V::kSkip;
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
    store_vector<T, VEC, kAligned>(to, out, Site::kY);
  } else {
    float scales[VEC];
    float biases[VEC] = {};
    unpack<typename V::U, VEC>(scale, scales);
    if constexpr (V::kBias) unpack<typename V::U, VEC>(bias, biases);
#pragma unroll
    for (int i = 0; i < VEC; ++i) values[i] = output_of<V>(values[i], scales[i], biases[i]);
    store_vector<Y, VEC, kAligned>(to, pack<Y, VEC>(values), Site::kY);
  }
}

}  // namespace rmsnorm
