// What one instruction set offers the dispatcher: a function for each combination of dtypes and options that does a
// range of rows. Everything here is plain data, so that files compiled for different instruction sets share no code.
#ifndef RMSNORM_DEPLOY_CPU_ROWS_H_
#define RMSNORM_DEPLOY_CPU_ROWS_H_

#include <stdint.h>

#include "../rms_norm.h"

namespace rmsnorm_simd {

// IEEE binary16 and bfloat16 as they lie in memory.
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

// A parameter of one element is given as a block of kBlock equal ones that the loop reads again and again.
constexpr int kBlock = 128;

// One call, with absent and one-element parameters already replaced by blocks.
struct Call {
  const rmsnorm_args* args;
  const void* scale;
  const void* bias;
  int64_t scale_step;  // 1, or 0 to read the block again and again
  int64_t bias_step;
};

using RowsFn = void (*)(const Call& call, int64_t begin, int64_t end);

// The function for args, or nullptr where this instruction set has none (float64 with a float32 stash is generic's).
// stream: write past the caches.
RowsFn avx512_rows(const rmsnorm_args& args, bool stream);
RowsFn avx2_rows(const rmsnorm_args& args, bool stream);
RowsFn neon_rows(const rmsnorm_args& args, bool stream);
RowsFn generic_rows(const rmsnorm_args& args, bool stream);

}  // namespace rmsnorm_simd

#endif  // RMSNORM_DEPLOY_CPU_ROWS_H_
