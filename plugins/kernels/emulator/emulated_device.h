// The host's version of ../cuda/device.cuh: the same functions, run by fibers (one a thread of a block or cluster),
// with every access to memory checked and counted.
#pragma once

#include <stdint.h>

#include <cmath>
#include <cstring>

#include "../cuda/bits.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define RMSNORM_DEVICE inline

namespace rmsnorm {

constexpr int kSites = 9;

namespace emulator {

struct Index {
  unsigned x;
};
struct Coordinates {
  Index thread;
  Index block;
  Index block_size;
  Index grid_size;
};

// Of the fiber that runs.
const Coordinates& here();
void read_global(const char* from, void* to, int bytes, Site site);
void write_global(char* to, const void* from, int bytes, Site site);
void read_shared(int offset, void* to, int bytes);
void write_shared(int rank, int offset, const void* from, int bytes);  // rank < 0: this block's own
float exchange(float value, int mask);
void block_barrier();
void cluster_arrive();
void cluster_wait();

uint16_t half_from(float value);
float half_to(uint16_t raw);
uint16_t bfloat_from(float value);

}  // namespace emulator

#define threadIdx (::rmsnorm::emulator::here().thread)
#define blockIdx (::rmsnorm::emulator::here().block)
#define blockDim (::rmsnorm::emulator::here().block_size)
#define gridDim (::rmsnorm::emulator::here().grid_size)

template <int BYTES>
Bits<BYTES> load_global(const char* from, Site site) {
  Bits<BYTES> out;
  char* const bytes = reinterpret_cast<char*>(out.word);
  constexpr int kOnce = BYTES < 16 ? BYTES : 16;
  for (int done = 0; done < BYTES; done += kOnce) emulator::read_global(from + done, bytes + done, kOnce, site);
  return out;
}

template <int BYTES>
void store_global(char* to, const Bits<BYTES>& bits, Site site) {
  const char* const bytes = reinterpret_cast<const char*>(bits.word);
  constexpr int kOnce = BYTES < 16 ? BYTES : 16;
  for (int done = 0; done < BYTES; done += kOnce) emulator::write_global(to + done, bytes + done, kOnce, site);
}

template <int BYTES>
Bits<BYTES> load_shared(int offset) {
  Bits<BYTES> out;
  emulator::read_shared(offset, out.word, BYTES);
  return out;
}

template <int BYTES>
void store_shared(int offset, const Bits<BYTES>& bits) {
  emulator::write_shared(-1, offset, bits.word, BYTES);
}

inline void store_shared_of(int rank, int offset, float value) { emulator::write_shared(rank, offset, &value, 4); }
inline float shuffle_xor(float value, int mask) { return emulator::exchange(value, mask); }
inline void block_barrier() { emulator::block_barrier(); }
inline void cluster_arrive_started() { emulator::cluster_arrive(); }
inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float half_to_float(uint16_t raw) { return emulator::half_to(raw); }
inline uint16_t float_to_half(float value) { return emulator::half_from(value); }
inline uint16_t float_to_bfloat(float value) { return emulator::bfloat_from(value); }
inline uint32_t floats_to_half2(float low, float high) {
  return static_cast<uint32_t>(float_to_half(low)) | (static_cast<uint32_t>(float_to_half(high)) << 16);
}
inline uint32_t floats_to_bfloat2(float low, float high) {
  return static_cast<uint32_t>(float_to_bfloat(low)) | (static_cast<uint32_t>(float_to_bfloat(high)) << 16);
}

inline uint32_t multiply_half2(uint32_t a, uint32_t b) {
  return floats_to_half2(
      emulator::half_to(static_cast<uint16_t>(a)) * emulator::half_to(static_cast<uint16_t>(b)),
      emulator::half_to(static_cast<uint16_t>(a >> 16)) * emulator::half_to(static_cast<uint16_t>(b >> 16)));
}
inline uint32_t add_half2(uint32_t a, uint32_t b) {
  return floats_to_half2(
      emulator::half_to(static_cast<uint16_t>(a)) + emulator::half_to(static_cast<uint16_t>(b)),
      emulator::half_to(static_cast<uint16_t>(a >> 16)) + emulator::half_to(static_cast<uint16_t>(b >> 16)));
}
inline uint32_t multiply_bfloat2(uint32_t a, uint32_t b) {
  return floats_to_bfloat2(bits_to_float(a << 16) * bits_to_float(b << 16),
                           bits_to_float(a & 0xffff0000u) * bits_to_float(b & 0xffff0000u));
}
inline uint32_t add_bfloat2(uint32_t a, uint32_t b) {
  return floats_to_bfloat2(bits_to_float(a << 16) + bits_to_float(b << 16),
                           bits_to_float(a & 0xffff0000u) + bits_to_float(b & 0xffff0000u));
}

// The emulator is compiled without contraction, so each of these rounds on its own, as on the device.
inline float multiply(float a, float b) { return a * b; }
inline float add(float a, float b) { return a + b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float reciprocal(float a) { return 1.0f / a; }
inline float square_root(float a) { return std::sqrt(a); }

}  // namespace rmsnorm
