#include "stores.h"

#include <stdint.h>
#include <unistd.h>

#include <chrono>

#include "bytes.h"

namespace rmsnorm_simd {
namespace {

// The parts of the third-level cache, in eighths, from which on a call asks where its output is, and from which on it
// writes past the caches without asking, since input and output would push each other out. docs/kernels.md has the
// measurements.
constexpr int64_t kAskEighths = 1;
constexpr int64_t kPastEighths = 6;

// The most that one process gets of a cache, an eighth of it: a part shared by many cores reports all of its cache.
constexpr int64_t kMostEighth = int64_t{4} << 20;

int64_t cache_eighth() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t reported = sysconf(_SC_LEVEL3_CACHE_SIZE) / 8;
  if (reported > 0 && reported < kMostEighth) return reported;
#endif
  return kMostEighth;
}

// So many pages are looked at, at most.
constexpr int64_t kProbes = 8;
constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
// What a line took on average: 7 to 40 from a core's own caches, 60 to 200 from memory or from another core's.
constexpr int64_t kColdNanoseconds = 50;

// Rows of the output, as if nothing lay between them.
struct Output {
  const unsigned char* y;
  int64_t row;     // in bytes
  int64_t stride;  // in bytes

  Output(const rmsnorm_args& args, int64_t first_row)
      : y(static_cast<const unsigned char*>(args.y) + first_row * args.y_stride * size_of(args.y_dtype)),
        row(args.width * size_of(args.y_dtype)),
        stride(args.y_stride * size_of(args.y_dtype)) {}

  // Reads a byte of each page, another line in each. Every address waits for the byte before it, or processors would
  // read all at once. Nothing comes of the bytes, so that it does not matter who may be writing them.
  uint64_t read(int64_t step, int64_t from) const {
    uint64_t zero = 0;
    for (int64_t i = 0; i < kProbes; i++) {
      const int64_t at = i * step + (from + i * kLine) % kPage;
      zero &= *static_cast<const volatile unsigned char*>(y + at / row * stride + at % row + zero);
      __asm__ volatile("" : "+r"(zero));  // or compilers know that it is zero
    }
    return zero;
  }
};

bool in_no_cache(const rmsnorm_args& args, int64_t first_row, int64_t end_row) {
  Output output(args, first_row);
  const int64_t step = (end_row - first_row) * output.row / kProbes / kPage * kPage;
  if (step == 0) return false;
  output.y += output.read(step, 0);  // finds the pages, which would take as long as a line
  const auto began = std::chrono::steady_clock::now();
  output.read(step, kPage / 2);
  return std::chrono::steady_clock::now() - began > std::chrono::nanoseconds(kProbes * kColdNanoseconds);
}

}  // namespace

Stores stores_for(const rmsnorm_args& args, bool helped) {
  // One thread alone computes half types for longer than memory takes.
  if (!helped && size_of(args.x_dtype) == 2) return Stores::kPlain;
  const bool aligned = reinterpret_cast<uintptr_t>(args.y) % static_cast<uintptr_t>(size_of(args.y_dtype)) == 0;
  const bool in_place =
      args.y == args.x || args.y == args.skip || (args.sum && (args.sum == args.x || args.sum == args.skip));
  if (!aligned || in_place) return Stores::kPlain;
  const auto touches = [&args](int64_t eighths) { return args.rows >= eighths * cache_eighth() / row_bytes(args); };
  if (touches(kPastEighths)) return Stores::kPastCaches;
  return touches(kAskEighths) ? Stores::kAskMemory : Stores::kPlain;
}

bool should_stream(Stores stores, const rmsnorm_args& args, int64_t first_row, int64_t end_row) {
  return stores == Stores::kPastCaches || (stores == Stores::kAskMemory && in_no_cache(args, first_row, end_row));
}

}  // namespace rmsnorm_simd
