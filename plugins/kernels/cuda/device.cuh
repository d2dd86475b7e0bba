// The few things a kernel asks of the hardware, each behind a small function: memory, shuffles, barriers, clusters and
// conversions. The host emulator (../emulator) compiles the kernels against its own version of this file; nothing else
// differs.
#pragma once

#if defined(RMSNORM_EMULATOR)
#include "emulated_device.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "bits.h"

#define RMSNORM_DEVICE __device__ __forceinline__

namespace rmsnorm {

// Plain loads, not the read-only path: y may be x itself, and the parameters may be what the previous kernel is still
// writing when this one starts early.
template <int BYTES>
RMSNORM_DEVICE Bits<BYTES> load_global(const char* from, Site) {
  Bits<BYTES> out;
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const uint4 quad = reinterpret_cast<const uint4*>(from)[i];
      out.word[4 * i] = quad.x;
      out.word[4 * i + 1] = quad.y;
      out.word[4 * i + 2] = quad.z;
      out.word[4 * i + 3] = quad.w;
    }
  } else if constexpr (BYTES == 4) {
    out.word[0] = *reinterpret_cast<const uint32_t*>(from);
  } else {
    out.word[0] = *reinterpret_cast<const uint16_t*>(from);
  }
  return out;
}

template <int BYTES>
RMSNORM_DEVICE void store_global(char* to, const Bits<BYTES>& bits, Site) {
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      reinterpret_cast<uint4*>(to)[i] =
          make_uint4(bits.word[4 * i], bits.word[4 * i + 1], bits.word[4 * i + 2], bits.word[4 * i + 3]);
    }
  } else if constexpr (BYTES == 4) {
    *reinterpret_cast<uint32_t*>(to) = bits.word[0];
  } else {
    *reinterpret_cast<uint16_t*>(to) = bits.word[0];
  }
}

// Shared memory is addressed in bytes from the start of the block's dynamic allocation.
RMSNORM_DEVICE char* shared_memory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

template <int BYTES>
RMSNORM_DEVICE Bits<BYTES> load_shared(int offset) {
  return load_global<BYTES>(shared_memory() + offset, Site::kX);
}

template <int BYTES>
RMSNORM_DEVICE void store_shared(int offset, const Bits<BYTES>& bits) {
  store_global<BYTES>(shared_memory() + offset, bits, Site::kX);
}

RMSNORM_DEVICE float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

RMSNORM_DEVICE void block_barrier() { __syncthreads(); }

// Clusters and early starts exist from sm_90; a launch elsewhere never asks for them. The barriers are not the
// "aligned" ones: a warp's lanes may come from different branches.

// Says that this block has started; it has written nothing yet that another would have to see.
RMSNORM_DEVICE void cluster_arrive_started() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}

RMSNORM_DEVICE void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

RMSNORM_DEVICE void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Stores a float at the same offset in the shared memory of the cluster's block `rank`.
RMSNORM_DEVICE void store_shared_of(int rank, int offset, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t here = static_cast<uint32_t>(__cvta_generic_to_shared(shared_memory() + offset));
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}

// Waits until the kernel before this one in the stream is done and its writes are seen.
RMSNORM_DEVICE void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start on multiprocessors that fall idle; it waits for this one's end by itself.
RMSNORM_DEVICE void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

RMSNORM_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
RMSNORM_DEVICE uint32_t float_to_bits(float value) { return __float_as_uint(value); }
RMSNORM_DEVICE float half_to_float(uint16_t raw) { return __half2float(__ushort_as_half(raw)); }
RMSNORM_DEVICE uint16_t float_to_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
RMSNORM_DEVICE uint16_t float_to_bfloat(float value) { return __bfloat16_as_ushort(__float2bfloat16_rn(value)); }

// Two at a time, each rounded on its own.
RMSNORM_DEVICE __half2 as_half2(uint32_t raw) {
  return __halves2half2(__ushort_as_half(static_cast<uint16_t>(raw & 0xffffu)),
                        __ushort_as_half(static_cast<uint16_t>(raw >> 16)));
}
RMSNORM_DEVICE uint32_t bits_of(__half2 pair) {
  return static_cast<uint32_t>(__half_as_ushort(__low2half(pair))) |
         (static_cast<uint32_t>(__half_as_ushort(__high2half(pair))) << 16);
}
RMSNORM_DEVICE __nv_bfloat162 as_bfloat2(uint32_t raw) {
  return __halves2bfloat162(__ushort_as_bfloat16(static_cast<uint16_t>(raw & 0xffffu)),
                            __ushort_as_bfloat16(static_cast<uint16_t>(raw >> 16)));
}
RMSNORM_DEVICE uint32_t bits_of(__nv_bfloat162 pair) {
  return static_cast<uint32_t>(__bfloat16_as_ushort(__low2bfloat16(pair))) |
         (static_cast<uint32_t>(__bfloat16_as_ushort(__high2bfloat16(pair))) << 16);
}
RMSNORM_DEVICE uint32_t floats_to_half2(float low, float high) { return bits_of(__floats2half2_rn(low, high)); }
RMSNORM_DEVICE uint32_t multiply_half2(uint32_t a, uint32_t b) { return bits_of(__hmul2_rn(as_half2(a), as_half2(b))); }
RMSNORM_DEVICE uint32_t add_half2(uint32_t a, uint32_t b) { return bits_of(__hadd2_rn(as_half2(a), as_half2(b))); }
RMSNORM_DEVICE uint32_t floats_to_bfloat2(float low, float high) { return bits_of(__floats2bfloat162_rn(low, high)); }
RMSNORM_DEVICE uint32_t multiply_bfloat2(uint32_t a, uint32_t b) {
  return bits_of(__hmul2_rn(as_bfloat2(a), as_bfloat2(b)));
}
RMSNORM_DEVICE uint32_t add_bfloat2(uint32_t a, uint32_t b) {
  return bits_of(__hadd2_rn(as_bfloat2(a), as_bfloat2(b)));
}

// Rounded on their own: the compiler may not contract them into a fused multiply-add.
RMSNORM_DEVICE float multiply(float a, float b) { return __fmul_rn(a, b); }
RMSNORM_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
RMSNORM_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
RMSNORM_DEVICE float reciprocal(float a) { return __frcp_rn(a); }
RMSNORM_DEVICE float square_root(float a) { return __fsqrt_rn(a); }

}  // namespace rmsnorm

#endif  // RMSNORM_EMULATOR
