// rows_impl.h compiled for avx2: see CMakeLists.txt for the flags.
#include <immintrin.h>

#include "rows.h"

namespace rmsnorm_simd {
namespace {

#include "vec_avx2.h"
#define RMSNORM_CPU_FLOAT Float
#define RMSNORM_CPU_DOUBLE Double
#include "rows_impl.h"

}  // namespace

Functions avx2_rows(const rmsnorm_args& args, bool stream) { return choose_rows(args, stream); }

}  // namespace rmsnorm_simd
