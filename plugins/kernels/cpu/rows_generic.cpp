// rows_impl.h in plain C++, and the one case that no vector file has: float64 rows with float32 statistics.
#include "rows.h"

namespace rmsnorm_simd {
namespace {

#include "vec_generic.h"
#define RMSNORM_CPU_FLOAT Float
#define RMSNORM_CPU_DOUBLE Double
#include "rows_impl.h"

// x, scale, bias and y are float64 and all arithmetic up to the cast is float32. Nobody's hot path: one element at a
// time.
struct Narrowed {
  static double input(const rmsnorm_args& args, int64_t row, int64_t i) {
    const double x = static_cast<const double*>(args.x)[row * args.x_stride + i];
    return args.skip ? x + static_cast<const double*>(args.skip)[row * args.skip_stride + i] : x;
  }

  static float root_of(const rmsnorm_args& args, int64_t row) {
    double total = 0;
    for (int64_t i = 0; i < args.width; i++) {
      const float x = static_cast<float>(input(args, row, i));
      total += static_cast<double>(x * x);
    }
    const double mean = total / static_cast<double>(args.width);
    return static_cast<float>(root(args, static_cast<double>(static_cast<float>(args.eps)), mean));
  }

  static double finish(float n, double scale, double bias, bool after, bool has_bias) {
    if (after) return has_bias ? n * scale + bias : n * scale;
    const float product = n * static_cast<float>(scale);
    return has_bias ? product + static_cast<float>(bias) : product;
  }

  static void run(const Call& call, Deal& deal, int64_t part) {
    Taker taker(deal, part);
    while (taker.next()) run_row(call, taker.row);
  }

  static void run_row(const Call& call, int64_t row) {
    const rmsnorm_args& args = *call.args;
    const double* scale = static_cast<const double*>(call.scale);
    const double* bias = static_cast<const double*>(call.bias);
    const bool after = args.scale_order == RMSNORM_AFTER_CAST;
    const float r = root_of(args, row);
    for (int64_t i = 0; i < args.width; i++) {
      const double x = input(args, row, i);
      if (args.sum) static_cast<double*>(args.sum)[row * args.sum_stride + i] = x;
      const double s = scale[call.scale_step ? i : 0];
      const double b = bias[call.bias_step ? i : 0];
      static_cast<double*>(args.y)[row * args.y_stride + i] =
          finish(static_cast<float>(x) / r, s, b, after, args.bias != nullptr);
    }
  }
};

}  // namespace

Functions generic_rows(const rmsnorm_args& args, bool stream) {
  if (args.x_dtype == RMSNORM_F64 && args.stash == RMSNORM_STASH_F32) return {Narrowed::run, nullptr, nullptr};
  return choose_rows(args, stream && false);
}

}  // namespace rmsnorm_simd
