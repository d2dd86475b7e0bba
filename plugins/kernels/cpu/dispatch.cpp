// rmsnorm_cpu: picks an instruction set, and deals rows out to the caller's threads.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#if defined(RMSNORM_CPU_X86)
#include <cpuid.h>
#endif

#include "../rms_norm.h"
#include "bytes.h"
#include "rows.h"
#include "stores.h"

namespace rmsnorm_simd {
namespace {

struct Isa {
  const char* name;
  Functions (*functions)(const rmsnorm_args& args, bool stream);
  bool (*here)();
};

bool always() { return true; }

#if defined(RMSNORM_CPU_X86)
// Not among the names that every compiler's __builtin_cpu_supports knows.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & 1u << 29) != 0;
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && has_f16c();
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c(); }
#endif

// Best first.
const Isa kIsas[] = {
#if defined(RMSNORM_CPU_X86)
    {"avx512", avx512_rows, has_avx512},
    {"avx2", avx2_rows, has_avx2},
#elif defined(RMSNORM_CPU_NEON)
    {"neon", neon_rows, always},
#endif
    {"generic", generic_rows, always},
};

const Isa* best() {
  for (const Isa& isa : kIsas) {
    if (isa.here()) return &isa;
  }
  return nullptr;
}

// The one named; the best for nullptr and ""; nullptr where it is not to be had.
const Isa* named(const char* name) {
  if (!name || !*name) return best();
  for (const Isa& isa : kIsas) {
    if (strcmp(isa.name, name) == 0 && isa.here()) return &isa;
  }
  return nullptr;
}

const Isa* initial() {
  const Isa* wanted = named(getenv("RMSNORM_CPU_ISA"));
  return wanted ? wanted : best();
}

std::atomic<const Isa*>& current() {
  static std::atomic<const Isa*> isa{initial()};
  return isa;
}

Functions functions_for(const rmsnorm_args& args, bool stream) {
  const Functions functions = current().load(std::memory_order_relaxed)->functions(args, stream);
  return functions.rows ? functions : generic_rows(args, stream);
}

// How many threads may come. A caller who does not know has no more than this machine.
int64_t threads_of(const rmsnorm_parallel* parallel) {
  if (!parallel || !parallel->parallel_for) return 1;
  if (parallel->threads > 0) return parallel->threads;
  static const int64_t here = std::thread::hardware_concurrency();
  return here > 0 ? here : kMostParts;
}

// kBlock copies of one element, or of 1 or -0 where there is none: n * 1 is n and n + -0 is n, signs of zeros included.
struct Block {
  alignas(64) unsigned char bytes[kBlock * 8];

  void fill(const void* element, int64_t size) {
    for (int64_t i = 0; i < kBlock; i++) memcpy(bytes + i * size, element, static_cast<size_t>(size));
  }
  void fill_one(int32_t dtype) {
    const double f64 = 1;
    const float f32 = 1;
    const uint16_t half = dtype == RMSNORM_F16 ? 0x3c00 : 0x3f80;
    const void* one = dtype == RMSNORM_F64 ? static_cast<const void*>(&f64) : &f32;
    fill(size_of(dtype) == 2 ? &half : one, size_of(dtype));
  }
};

// One call. All that is the same for every task lies in one place: threads read it from the cache of the core that
// wrote it, and then wait for its lines once and not once for each pointer.
struct Job {
  rmsnorm_args args;
  Call call;
  Stores stores;
  Functions plain;
  Functions streaming;
  std::thread::id caller;
  std::atomic<bool> helped;  // by another thread
  Deal deal;

  const Functions& functions(int64_t first_row, int64_t end_row) const {
    return should_stream(stores, args, first_row, end_row) ? streaming : plain;
  }
};

// How many calls in a row no other thread has helped with: a pool may have threads, and does not say.
std::atomic<int> unhelped_calls{0};
constexpr int kUnhelpedCalls = 16;

void count_help(bool helped) {
  if (helped)
    unhelped_calls.store(0, std::memory_order_relaxed);
  else if (unhelped_calls.load(std::memory_order_relaxed) < kUnhelpedCalls)
    unhelped_calls.fetch_add(1, std::memory_order_relaxed);
}

bool usually_helped() { return unhelped_calls.load(std::memory_order_relaxed) < kUnhelpedCalls; }

// ---- rows dealt out to threads

// Fewer bytes are not worth waking a thread for: some microseconds, at a cache's bandwidth.
constexpr int64_t kShareBytes = int64_t{128} << 10;
// Rows of so many bytes at least are taken at a time.
constexpr int64_t kTakeBytes = int64_t{16} << 10;
// Rows of fewer bytes are not worth bringing them from another core's cache, and back with the next call.
constexpr int64_t kHelpBytes = int64_t{64} << 10;

void deal_rows(Job& job, int64_t threads) {
  Deal& deal = job.deal;
  const int64_t rows = job.args.rows;
  deal.least = kTakeBytes / row_bytes(job.args) + 1;
  deal.worth = kHelpBytes / row_bytes(job.args) + 1;
  const int64_t pieces = (rows + deal.least - 1) / deal.least;
  const int64_t most = threads < kMostParts ? threads : kMostParts;
  deal.parts = pieces < most ? pieces : most;
  for (int64_t i = 0; i < deal.parts; i++) {
    deal.part[i].begin = deal.part[i].next = rows * i / deal.parts;
    deal.part[i].end = rows * (i + 1) / deal.parts;
  }
}

void rows_task(void* arg, size_t part) {
  Job& job = *static_cast<Job*>(arg);
  const Part& own = job.deal.part[part];
  if (part > 0 && std::this_thread::get_id() != job.caller) job.helped.store(true, std::memory_order_relaxed);
  job.functions(own.begin, own.end).rows(job.call, job.deal, static_cast<int64_t>(part));
}

// ---- rows so long that threads share each

// Rows of fewer bytes, some 40 microseconds of work, are not worth waking threads for twice.
constexpr int64_t kLongBytes = int64_t{2} << 20;
constexpr int64_t kSpansAtOnce = 512;
constexpr int64_t kPieces = 16;

bool should_share_rows(const rmsnorm_args& args, const Functions& functions, const rmsnorm_parallel* parallel) {
  return functions.squares && args.rows < threads_of(parallel) && row_bytes(args) >= kLongBytes;
}

// A row in pieces of whole spans, a piece a task.
struct SharedRow {
  const Job* job;
  const Functions* functions;
  int64_t row;
  int64_t first_span;  // of those now looked at
  int64_t spans;
  double squares;
  double sums[kSpansAtOnce];

  int64_t pieces() const { return spans < kPieces ? spans : kPieces; }
  int64_t span_of(size_t piece) const { return spans * static_cast<int64_t>(piece) / pieces(); }
  int64_t column(int64_t span) const {
    const int64_t width = job->call.args->width;
    const int64_t at = (first_span + span) * kSpan;
    return at < width ? at : width;
  }

  static void squares_task(void* arg, size_t piece) {
    SharedRow& self = *static_cast<SharedRow*>(arg);
    for (int64_t span = self.span_of(piece); span < self.span_of(piece + 1); span++)
      self.sums[span] = self.functions->squares(self.job->call, self.row, self.column(span), self.column(span + 1));
  }

  static void write_task(void* arg, size_t piece) {
    const SharedRow& self = *static_cast<const SharedRow*>(arg);
    const int64_t from = self.column(self.span_of(piece));
    self.functions->write(self.job->call, self.row, self.squares, from, self.column(self.span_of(piece + 1)));
  }

  void run(const rmsnorm_parallel& parallel) {
    const int64_t all = (job->call.args->width + kSpan - 1) / kSpan;
    squares = 0;
    for (first_span = 0; first_span < all; first_span += kSpansAtOnce) {
      spans = all - first_span < kSpansAtOnce ? all - first_span : kSpansAtOnce;
      parallel.parallel_for(parallel.pool, squares_task, this, static_cast<size_t>(pieces()));
      for (int64_t span = 0; span < spans; span++) squares += sums[span];
    }
    first_span = 0;
    spans = all;
    parallel.parallel_for(parallel.pool, write_task, this, static_cast<size_t>(pieces()));
  }
};

void run_job(Job& job, const rmsnorm_parallel* parallel) {
  const rmsnorm_args& args = job.args;
  if (should_share_rows(args, job.plain, parallel)) {
    SharedRow shared;
    shared.job = &job;
    shared.functions = &job.functions(0, args.rows);
    for (shared.row = 0; shared.row < args.rows; shared.row++) shared.run(*parallel);
    return;
  }
  const bool alone = args.rows < kShareBytes / row_bytes(args) + 1;
  deal_rows(job, alone ? 1 : threads_of(parallel));
  if (job.deal.parts == 1) {
    rows_task(&job, 0);
    return;
  }
  parallel->parallel_for(parallel->pool, rows_task, &job, static_cast<size_t>(job.deal.parts));
  count_help(job.helped.load(std::memory_order_relaxed));
}

}  // namespace
}  // namespace rmsnorm_simd

extern "C" rmsnorm_status rmsnorm_cpu(const rmsnorm_args* args, const rmsnorm_parallel* parallel) {
  using namespace rmsnorm_simd;
  const rmsnorm_status status = rmsnorm_check(args);
  if (status != RMSNORM_OK || args->rows == 0 || args->width == 0) return status;

  const int32_t dtype = args->scale || args->bias ? args->param_dtype : args->x_dtype;
  Block scale_block;
  Block bias_block;
  Job job;
  job.args = *args;
  job.call = {&job.args, args->scale, args->bias, 1, 1};
  job.stores = stores_for(*args, threads_of(parallel) > 1 && usually_helped());
  job.plain = functions_for(*args, false);
  job.streaming = job.stores == Stores::kPlain ? job.plain : functions_for(*args, true);
  job.caller = std::this_thread::get_id();
  job.helped = false;
  if (!args->scale || args->scale_count != args->width) {
    if (args->scale)
      scale_block.fill(args->scale, size_of(dtype));
    else
      scale_block.fill_one(dtype);
    job.call.scale = scale_block.bytes;
    job.call.scale_step = 0;
  }
  if (args->bias && args->bias_count != args->width) {
    bias_block.fill(args->bias, size_of(dtype));
    job.call.bias = bias_block.bytes;
    job.call.bias_step = 0;
  }
  run_job(job, parallel);
  return RMSNORM_OK;
}

extern "C" const char* rmsnorm_cpu_isa(void) { return rmsnorm_simd::current().load()->name; }

extern "C" rmsnorm_status rmsnorm_cpu_set_isa(const char* isa) {
  const rmsnorm_simd::Isa* wanted = rmsnorm_simd::named(isa);
  if (!wanted) return RMSNORM_UNSUPPORTED;
  rmsnorm_simd::current().store(wanted);
  return RMSNORM_OK;
}
