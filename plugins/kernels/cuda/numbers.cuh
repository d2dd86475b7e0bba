// The element types as the kernels see them: raw bits in memory, float in registers, and the rounding between the two.
#pragma once

#include <stdint.h>

#include "device.cuh"

namespace rmsnorm {

struct F32 {
  using Raw = uint32_t;
  static constexpr int kBytes = 4;
  static RMSNORM_DEVICE float up(Raw raw) { return bits_to_float(raw); }
  static RMSNORM_DEVICE Raw down(float value) { return float_to_bits(value); }
};

struct F16 {
  using Raw = uint16_t;
  static constexpr int kBytes = 2;
  static RMSNORM_DEVICE float up(Raw raw) { return half_to_float(raw); }
  static RMSNORM_DEVICE Raw down(float value) { return float_to_half(value); }
  static RMSNORM_DEVICE uint32_t down2(float low, float high) { return floats_to_half2(low, high); }
  static RMSNORM_DEVICE uint32_t multiply2(uint32_t a, uint32_t b) { return multiply_half2(a, b); }
  static RMSNORM_DEVICE uint32_t add2(uint32_t a, uint32_t b) { return add_half2(a, b); }
};

struct BF16 {
  using Raw = uint16_t;
  static constexpr int kBytes = 2;
  // A bfloat16 is the upper half of a float.
  static RMSNORM_DEVICE float up(Raw raw) { return bits_to_float(static_cast<uint32_t>(raw) << 16); }
  static RMSNORM_DEVICE Raw down(float value) { return float_to_bfloat(value); }
  static RMSNORM_DEVICE uint32_t down2(float low, float high) { return floats_to_bfloat2(low, high); }
  static RMSNORM_DEVICE uint32_t multiply2(uint32_t a, uint32_t b) { return multiply_bfloat2(a, b); }
  static RMSNORM_DEVICE uint32_t add2(uint32_t a, uint32_t b) { return add_bfloat2(a, b); }
};

// `value` rounded to T: what a store to T and a load back would give.
template <class T>
RMSNORM_DEVICE float round_to(float value) {
  return T::up(T::down(value));
}
template <>
RMSNORM_DEVICE float round_to<F32>(float value) {
  return value;
}

// VEC neighbouring elements of T as they lie in memory.
template <class T, int VEC>
using Pack = Bits<VEC * T::kBytes>;

template <class T, int VEC>
RMSNORM_DEVICE void unpack(const Pack<T, VEC>& pack, float (&out)[VEC]) {
  if constexpr (VEC == 1) {
    out[0] = T::up(pack.word[0]);
  } else if constexpr (T::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) out[i] = T::up(pack.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) {
      out[2 * i] = T::up(static_cast<uint16_t>(pack.word[i] & 0xffffu));
      out[2 * i + 1] = T::up(static_cast<uint16_t>(pack.word[i] >> 16));
    }
  }
}

template <class T, int VEC>
RMSNORM_DEVICE Pack<T, VEC> pack(const float (&in)[VEC]) {
  Pack<T, VEC> out;
  if constexpr (VEC == 1) {
    out.word[0] = T::down(in[0]);
  } else if constexpr (T::kBytes == 4) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) out.word[i] = T::down(in[i]);
  } else {
#pragma unroll
    for (int i = 0; i < VEC / 2; ++i) out.word[i] = T::down2(in[2 * i], in[2 * i + 1]);
  }
  return out;
}

template <class T, int VEC>
RMSNORM_DEVICE Pack<T, 1> element_of(const Pack<T, VEC>& pack, int i) {
  Pack<T, 1> out;
  if constexpr (T::kBytes == 4) {
    out.word[0] = pack.word[i];
  } else {
    out.word[0] = static_cast<uint16_t>(pack.word[i / 2] >> (16 * (i & 1)));
  }
  return out;
}

// What begins `bytes` (below 16, and whole elements of T) into `wide`. The words to take are chosen by selects: an
// array indexed by what is known at run time alone would be in local memory.
template <class T, int BYTES>
RMSNORM_DEVICE Bits<BYTES - 16> shifted_down(const Bits<BYTES>& wide, int bytes) {
  constexpr int kWords = BYTES / 4;
  Bits<BYTES> from = wide;
#pragma unroll
  for (int i = 0; i + 2 < kWords; ++i) from.word[i] = (bytes & 8) != 0 ? from.word[i + 2] : from.word[i];
#pragma unroll
  for (int i = 0; i + 1 < kWords; ++i) from.word[i] = (bytes & 4) != 0 ? from.word[i + 1] : from.word[i];
  Bits<BYTES - 16> out;
#pragma unroll
  for (int i = 0; i < kWords - 4; ++i) {
    out.word[i] = from.word[i];
    if constexpr (T::kBytes == 2) {
      const uint64_t both = (uint64_t{from.word[i + 1]} << 32) | from.word[i];
      out.word[i] = static_cast<uint32_t>(both >> (8 * (bytes & 2)));
    }
  }
  return out;
}

}  // namespace rmsnorm
