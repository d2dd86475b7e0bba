// What one instruction set offers the dispatcher: functions for each combination of dtypes and options. Everything here
// is plain data, so that files compiled for different instruction sets share no code.
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

// The statistics of this many elements are added up on their own, so that the error of a sum stays that of a few
// hundred additions however wide the row is, and threads that share a row get what one of them would.
constexpr int64_t kSpan = 8192;

// The rows of a call, dealt out in parts: a task begins with its own, so that the next call finds its rows in the same
// core's cache, and then helps with those of others.
constexpr int64_t kMostParts = 64;

struct Part {
  alignas(128) int64_t next;  // the first row that nobody has taken; all tasks change it
  int64_t begin;
  int64_t end;
};

struct Deal {
  int64_t parts;
  int64_t least;  // how many rows to take at a time, where there are so many
  int64_t worth;  // how many rows another's part must have left to be helped with
  Part part[kMostParts];
};

struct Functions {
  // The rows of a part, and what is left of the others; nullptr where an instruction set has no function for the call.
  void (*rows)(const Call& call, Deal& deal, int64_t part);
  // For a row done by several threads, by columns from .. end - 1, with `from` a multiple of kSpan: their sum of
  // squares, which is the row's where it is added up span by span, and then what is written. nullptr where that is not
  // to be had.
  double (*squares)(const Call& call, int64_t row, int64_t from, int64_t end);
  void (*write)(const Call& call, int64_t row, double squares, int64_t from, int64_t end);
};

// Float64 with a float32 stash is generic's alone. stream: write past the caches.
Functions avx512_rows(const rmsnorm_args& args, bool stream);
Functions avx2_rows(const rmsnorm_args& args, bool stream);
Functions neon_rows(const rmsnorm_args& args, bool stream);
Functions generic_rows(const rmsnorm_args& args, bool stream);

}  // namespace rmsnorm_simd

#endif  // RMSNORM_DEPLOY_CPU_ROWS_H_
