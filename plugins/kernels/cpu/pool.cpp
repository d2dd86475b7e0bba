// rmsnorm_cpu_pool: threads for callers who have none of their own (PyTorch through ctypes, plain C).
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "../rms_norm.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// One job at a time. A worker that finds none spins for a while, since norms come in quick succession, then sleeps.
// Neither takes a lock while jobs come that quickly.
class Pool {
 public:
  explicit Pool(int32_t threads) {
    handle_ = {run, this, threads};
    for (int32_t i = 1; i < threads; i++) std::thread([this] { work(); }).detach();
  }

  const rmsnorm_parallel* handle() const { return &handle_; }

 private:
  static constexpr int kSpins = 2000;

  static void run(void* self, rmsnorm_task task, void* arg, size_t count) {
    static_cast<Pool*>(self)->parallel_for(task, arg, count);
  }

  void parallel_for(rmsnorm_task task, void* arg, size_t count) {
    if (busy_.exchange(true)) {  // another caller's job is under way
      for (size_t i = 0; i < count; i++) task(arg, i);
      return;
    }
    task_ = task;
    arg_ = arg;
    count_ = count;
    next_.store(0);
    open_.store(true);
    generation_.fetch_add(1);
    wake_sleepers();
    drain(task, arg, count);
    open_.store(false);  // a worker that comes only now leaves this job alone
    while (inside_.load() != 0) relax();
    busy_.store(false);
  }

  void drain(rmsnorm_task task, void* arg, size_t count) {
    for (size_t i = next_.fetch_add(1); i < count; i = next_.fetch_add(1)) task(arg, i);
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load() == seen; i++) relax();
      if (generation_.load() == seen) sleep(seen);
      seen = generation_.load();
      // In this order: the caller closes a job, and then waits for those inside.
      inside_.fetch_add(1);
      if (open_.load()) drain(task_, arg_, count_);
      inside_.fetch_sub(1);
    }
  }

  // Until there is another generation. Whoever makes one looks for sleepers afterwards, and whoever sleeps looks at the
  // generation after it has said so: one of them sees the other.
  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return generation_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  void wake_sleepers() {
    if (sleepers_.load() == 0) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }

  rmsnorm_parallel handle_;
  std::atomic<bool> busy_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  alignas(128) std::atomic<uint64_t> generation_{0};  // on lines of its own: all workers watch it
  alignas(128) std::atomic<bool> open_{false};
  // Of the job: written before it is opened, and not again before nobody is inside.
  rmsnorm_task task_ = nullptr;
  void* arg_ = nullptr;
  size_t count_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<int> inside_{0};
};

constexpr int32_t kMostThreads = 256;

}  // namespace

// Pools are never destroyed: their threads may outlive the static objects of a process that is ending.
extern "C" const rmsnorm_parallel* rmsnorm_cpu_pool(int32_t threads) {
  static std::mutex mutex;
  static std::vector<std::pair<int32_t, Pool*>>& pools = *new std::vector<std::pair<int32_t, Pool*>>;
  if (threads <= 1) return nullptr;
  if (threads > kMostThreads) threads = kMostThreads;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& entry : pools) {
    if (entry.first == threads) return entry.second->handle();
  }
  try {
    pools.reserve(pools.size() + 1);
    Pool* pool = new Pool(threads);
    pools.emplace_back(threads, pool);
    return pool->handle();
  } catch (const std::bad_alloc&) {
    return nullptr;
  } catch (const std::system_error&) {  // no more threads to be had; those that started keep the leaked pool alive
    return nullptr;
  }
}
