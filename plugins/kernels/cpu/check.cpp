// What both kernels demand of their arguments, and the words for a status. No CPU kernel is needed to link this file.
#include "../rms_norm.h"

namespace {

bool between(int32_t value, int32_t low, int32_t high) { return value >= low && value <= high; }

int64_t size_of(int32_t dtype) { return dtype == RMSNORM_F64 ? 8 : dtype == RMSNORM_F32 ? 4 : 2; }

// Strides and the bytes that they span must be countable in 63 bits.
bool fits(int64_t rows, int64_t stride, int64_t width, int32_t dtype) {
  int64_t last = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
  return !__builtin_mul_overflow(rows - 1, stride, &last) && !__builtin_add_overflow(last, width, &elements) &&
         !__builtin_mul_overflow(elements, size_of(dtype), &bytes);
}

bool enums_known(const rmsnorm_args& a) {
  return between(a.x_dtype, RMSNORM_F32, RMSNORM_F64) && between(a.param_dtype, RMSNORM_F32, RMSNORM_F64) &&
         between(a.y_dtype, RMSNORM_F32, RMSNORM_F64) && between(a.eps_mode, RMSNORM_EPS_INSIDE, RMSNORM_EPS_CLAMP) &&
         between(a.scale_order, RMSNORM_AFTER_CAST, RMSNORM_BEFORE_CAST) &&
         between(a.stash, RMSNORM_STASH_F32, RMSNORM_STASH_F64) && a.reserved == 0;
}

bool dtypes_allowed(const rmsnorm_args& a) {
  const bool half = a.x_dtype == RMSNORM_F16 || a.x_dtype == RMSNORM_BF16;
  const bool params = a.scale || a.bias;
  if (params && a.param_dtype != a.x_dtype && !(half && a.param_dtype == RMSNORM_F32)) return false;
  if (a.stash == RMSNORM_STASH_F64 && a.x_dtype != RMSNORM_F64) return false;
  const bool wider = params && a.scale_order == RMSNORM_AFTER_CAST;
  return a.y_dtype == (wider ? a.param_dtype : a.x_dtype);
}

bool count_allowed(const void* param, int64_t count, int64_t width) { return !param || count == width || count == 1; }

bool outputs_allowed(const rmsnorm_args& a) {
  if (a.sum && !a.skip) return false;
  if (a.y == a.x && (a.y_dtype != a.x_dtype || a.y_stride != a.x_stride)) return false;
  if (a.y == a.skip && (a.y_dtype != a.x_dtype || a.y_stride != a.skip_stride)) return false;
  if (a.sum && a.sum == a.x && a.sum_stride != a.x_stride) return false;
  if (a.sum && a.sum == a.skip && a.sum_stride != a.skip_stride) return false;
  return a.sum != a.y;
}

bool stride_allowed(int64_t stride, const rmsnorm_args& a, bool input) {
  return stride >= a.width || (input && stride == 0) || a.rows == 1;
}

}  // namespace

extern "C" rmsnorm_status rmsnorm_check(const rmsnorm_args* args) {
  if (!args) return RMSNORM_BAD_ARGUMENT;
  const rmsnorm_args& a = *args;
  if (a.abi != RMSNORM_ABI) return RMSNORM_ABI_MISMATCH;
  if (!enums_known(a) || a.rows < 0 || a.width < 0 || !(a.eps >= 0) || a.workspace_bytes < 0)
    return RMSNORM_BAD_ARGUMENT;
  if (!dtypes_allowed(a)) return RMSNORM_BAD_DTYPE;
  if (a.rows == 0 || a.width == 0) return RMSNORM_OK;
  if (!a.x || !a.y || !outputs_allowed(a)) return RMSNORM_BAD_ARGUMENT;
  if (!count_allowed(a.scale, a.scale_count, a.width) || !count_allowed(a.bias, a.bias_count, a.width))
    return RMSNORM_BAD_ARGUMENT;
  if (!stride_allowed(a.x_stride, a, true) || !fits(a.rows, a.x_stride, a.width, a.x_dtype) ||
      !stride_allowed(a.y_stride, a, false) || !fits(a.rows, a.y_stride, a.width, a.y_dtype))
    return RMSNORM_BAD_ARGUMENT;
  if (a.skip && (!stride_allowed(a.skip_stride, a, true) || !fits(a.rows, a.skip_stride, a.width, a.x_dtype)))
    return RMSNORM_BAD_ARGUMENT;
  if (a.sum && (!stride_allowed(a.sum_stride, a, false) || !fits(a.rows, a.sum_stride, a.width, a.x_dtype)))
    return RMSNORM_BAD_ARGUMENT;
  return RMSNORM_OK;
}

extern "C" const char* rmsnorm_status_string(rmsnorm_status status) {
  switch (status) {
    case RMSNORM_OK:
      return "ok";
    case RMSNORM_BAD_ARGUMENT:
      return "bad argument: a null pointer, a negative size, a stride below the width, a parameter of another length "
             "or an unknown option";
    case RMSNORM_BAD_DTYPE:
      return "these dtypes do not go together: scale and bias have x's dtype, or float32 where x is float16 or "
             "bfloat16; float64 statistics need a float64 x";
    case RMSNORM_UNSUPPORTED:
      return "this build or device has no kernel for it";
    case RMSNORM_DEVICE_ERROR:
      return "the CUDA runtime reported an error";
    case RMSNORM_ABI_MISMATCH:
      return "the caller was built against another version of rms_norm.h than this library";
  }
  return "unknown status";
}
