// Compares the best instruction set of a machine with plain C++, which tests/test_cpu_kernel.py compares with float64:
// for machines without Python, such as an emulated one. Prints one line and ends with 0 where all is well.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "rms_norm.h"

namespace {

int64_t size_of(int32_t dtype) { return dtype == RMSNORM_F64 ? 8 : dtype == RMSNORM_F32 ? 4 : 2; }

float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

double read(const void* data, int64_t i, int32_t dtype) {
  if (dtype == RMSNORM_F64) return static_cast<const double*>(data)[i];
  if (dtype == RMSNORM_F32) return static_cast<double>(static_cast<const float*>(data)[i]);
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  if (dtype == RMSNORM_BF16) return static_cast<double>(bits_to_float(static_cast<uint32_t>(h) << 16));
  const int exponent = h >> 10 & 31;
  const int mantissa = h & 1023;
  const double magnitude = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

// Random values; those of the half types from random bits of moderate exponent.
std::vector<unsigned char> random_values(std::mt19937& random, int64_t count, int32_t dtype) {
  std::vector<unsigned char> data(static_cast<size_t>(count * size_of(dtype)) + 1);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < count; i++) {
    const double value = normal(random);
    const float single = static_cast<float>(value);
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    const uint16_t half = static_cast<uint16_t>((random() & 0x83ffu) | (12u + random() % 6u) << 10);
    const uint16_t brain = static_cast<uint16_t>(bits >> 16);
    unsigned char* to = data.data() + i * size_of(dtype);
    if (dtype == RMSNORM_F64)
      memcpy(to, &value, 8);
    else if (dtype == RMSNORM_F32)
      memcpy(to, &single, 4);
    else
      memcpy(to, dtype == RMSNORM_F16 ? &half : &brain, 2);
  }
  return data;
}

struct Tally {
  int64_t elements = 0;
  int64_t different = 0;
  double worst = 0;  // in units of the last place of y's dtype, roughly
};

double epsilon_of(int32_t dtype) {
  const double epsilons[] = {0x1p-23, 0x1p-10, 0x1p-7, 0x1p-52};
  return epsilons[dtype];
}

constexpr int kRows = 3;
constexpr unsigned char kCanary = 0xa5;

bool run(const char* isa, rmsnorm_args args, std::vector<unsigned char>* y, std::vector<unsigned char>* sum) {
  const size_t y_bytes = static_cast<size_t>(kRows * args.width * size_of(args.y_dtype));
  const size_t sum_bytes = static_cast<size_t>(kRows * args.width * size_of(args.x_dtype));
  y->assign(y_bytes + 64, kCanary);
  sum->assign(sum_bytes + 64, kCanary);
  args.y = y->data();
  args.sum = args.skip ? sum->data() : nullptr;
  if (rmsnorm_cpu_set_isa(isa) != RMSNORM_OK || rmsnorm_cpu(&args, nullptr) != RMSNORM_OK) return false;
  for (size_t i = 0; i < 64; i++) {
    if ((*y)[y_bytes + i] != kCanary || (args.sum && (*sum)[sum_bytes + i] != kCanary)) return false;
  }
  return true;
}

bool check(std::mt19937& random, rmsnorm_args args, bool skip, bool bias, const char* best, Tally* tally) {
  const auto x = random_values(random, kRows * args.width, args.x_dtype);
  const auto other = random_values(random, kRows * args.width, args.x_dtype);
  const auto scale = random_values(random, args.width, args.param_dtype);
  const auto offset = random_values(random, args.width, args.param_dtype);
  args.x = x.data();
  args.skip = skip ? other.data() : nullptr;
  args.scale = scale.data();
  args.bias = bias ? offset.data() : nullptr;
  std::vector<unsigned char> y, sum, want_y, want_sum;
  if (!run(best, args, &y, &sum) || !run("generic", args, &want_y, &want_sum)) return false;
  if (skip && sum != want_sum) return false;
  if (size_of(args.x_dtype) == 2 && y != want_y) return false;
  for (int64_t i = 0; i < kRows * args.width; i++) {
    const double got = read(y.data(), i, args.y_dtype);
    const double want = read(want_y.data(), i, args.y_dtype);
    // Scale times the normalized value may cancel against the bias: what one rounding of the larger of them costs.
    const double term = fabs(read(scale.data(), i % args.width, args.param_dtype)) * 4 + fabs(want) + (bias ? 4 : 0);
    const double coarse = fmax(epsilon_of(args.y_dtype), epsilon_of(args.x_dtype));
    const double error = fabs(got - want) / (coarse * term);
    tally->elements++;
    tally->different += got != want;
    tally->worst = fmax(tally->worst, isfinite(error) ? error : 1e9);
  }
  return true;
}

}  // namespace

int main() {
  const char* best = rmsnorm_cpu_isa();
  const int32_t pairs[][2] = {{RMSNORM_F32, RMSNORM_F32}, {RMSNORM_F16, RMSNORM_F16}, {RMSNORM_BF16, RMSNORM_BF16},
                              {RMSNORM_F64, RMSNORM_F64}, {RMSNORM_F16, RMSNORM_F32}, {RMSNORM_BF16, RMSNORM_F32}};
  std::mt19937 random(1);
  Tally tally;
  for (const auto& pair : pairs) {
    for (int options = 0; options < 24; options++) {
      for (int64_t width : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 1023, 4099, 8200}) {
        rmsnorm_args args = {};
        args.abi = RMSNORM_ABI;
        args.x_dtype = pair[0];
        args.param_dtype = pair[1];
        args.scale_order = options & 1;
        args.y_dtype = args.scale_order == RMSNORM_AFTER_CAST ? pair[1] : pair[0];
        args.eps_mode = options / 8;
        args.stash = pair[0] == RMSNORM_F64 ? RMSNORM_STASH_F64 : RMSNORM_STASH_F32;
        args.eps = 1e-3;
        args.rows = kRows;
        args.width = args.scale_count = args.bias_count = width;
        args.x_stride = args.skip_stride = args.y_stride = args.sum_stride = width;
        if (!check(random, args, (options & 2) != 0, (options & 4) != 0, best, &tally)) {
          printf("%s: width %lld, dtypes %d %d, options %d: refused, wrote too far, or other bits\n", best,
                 static_cast<long long>(width), pair[0], pair[1], options);
          return 1;
        }
      }
    }
  }
  const double share = static_cast<double>(tally.different) / static_cast<double>(tally.elements);
  printf("%s: %lld elements, %.3f%% differ from generic, by at most %.2f roundings\n", best,
         static_cast<long long>(tally.elements), 100 * share, tally.worst);
  return tally.worst <= 1.5 ? 0 : 1;
}
