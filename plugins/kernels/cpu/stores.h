// Whether a call writes its output past the caches. A plain store first reads the line that it overwrites, and pushes
// another out of the cache; a streaming store does neither, and whoever reads the output next finds it in memory.
#ifndef RMSNORM_DEPLOY_CPU_STORES_H_
#define RMSNORM_DEPLOY_CPU_STORES_H_

#include "../rms_norm.h"

namespace rmsnorm_simd {

enum class Stores {
  kPlain,
  kPastCaches,
  kAskMemory,  // past the caches where the output is in none of them
};

// helped: whether several threads share the rows.
Stores stores_for(const rmsnorm_args& args, bool helped);

// For some rows of the call, which one thread is going to write.
bool should_stream(Stores stores, const rmsnorm_args& args, int64_t first_row, int64_t end_row);

}  // namespace rmsnorm_simd

#endif  // RMSNORM_DEPLOY_CPU_STORES_H_
