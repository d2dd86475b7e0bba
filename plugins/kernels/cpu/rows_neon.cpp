// rows_impl.h compiled for neon: see CMakeLists.txt for the flags.
#include <arm_neon.h>

#include "rows.h"

namespace rmsnorm_simd {
namespace {

#include "vec_neon.h"
#define RMSNORM_CPU_FLOAT Float
#define RMSNORM_CPU_DOUBLE Double
#include "rows_impl.h"

}  // namespace

Functions neon_rows(const rmsnorm_args& args, bool stream) { return choose_rows(args, stream); }

}  // namespace rmsnorm_simd
