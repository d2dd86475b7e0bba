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

// Lines are looked at one after the other, each in a page of its own, so that nothing is fetched ahead.
constexpr int64_t kProbes = 16;
constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;
// On average, which includes finding the page: memory took 130 to 300, and caches up to 73, another core's included.
constexpr int64_t kColdNanoseconds = 90;

bool in_no_cache(const rmsnorm_args& args, int64_t first_row, int64_t end_row) {
  const unsigned char* y = static_cast<const unsigned char*>(args.y);
  const int64_t size = size_of(args.y_dtype);
  const int64_t row = args.width * size;
  const int64_t probes = (end_row - first_row) * row / kPage < kProbes ? (end_row - first_row) * row / kPage : kProbes;
  if (probes == 0) return false;
  const int64_t step = (end_row - first_row) * row / probes;
  uint64_t zero = 0;  // each address waits for the byte before it
  const auto began = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < probes; i++) {
    const int64_t at = i * step + i * kLine % kPage;  // counted without what lies between rows
    const int64_t offset = (first_row + at / row) * args.y_stride * size + at % row;
    zero &= *static_cast<const volatile unsigned char*>(y + offset + zero);
    __asm__ volatile("" : "+r"(zero));  // or compilers know that it is zero
  }
  const auto took = std::chrono::steady_clock::now() - began;
  return took > std::chrono::nanoseconds(probes * kColdNanoseconds);
}

}  // namespace

Stores stores_for(const rmsnorm_args& args) {
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
