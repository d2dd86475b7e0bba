// How much memory a call touches.
#ifndef RMSNORM_DEPLOY_CPU_BYTES_H_
#define RMSNORM_DEPLOY_CPU_BYTES_H_

#include <stdint.h>

#include "../rms_norm.h"

namespace rmsnorm_simd {

inline int64_t size_of(int32_t dtype) { return dtype == RMSNORM_F64 ? 8 : dtype == RMSNORM_F32 ? 4 : 2; }

// What one row reads and writes, at least 1.
inline int64_t row_bytes(const rmsnorm_args& args) {
  const int64_t like_x = 1 + (args.skip ? 1 : 0) + (args.sum ? 1 : 0);
  return args.width * (size_of(args.y_dtype) + like_x * size_of(args.x_dtype));
}

}  // namespace rmsnorm_simd

#endif  // RMSNORM_DEPLOY_CPU_BYTES_H_
