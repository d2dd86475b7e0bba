// One emulated launch: blocks and clusters of fibers, their memory, and the faults and counts that come of it.
#pragma once

#include <stdint.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "../cuda/select.h"
#include "emulated_device.h"
#include "emulator.h"
#include "fiber.h"

namespace rmsnorm::emulator {

constexpr int kWarp = 32;

// How far a thread has come: barriers of its block, and both halves of its cluster's.
struct Progress {
  int block = 0;
  int arrived = 0;
  int waited = 0;
};

struct SharedAccess {
  int thread = -1;  // in the cluster
  Progress at;
};

// What happened to a word of shared memory since it was last written.
struct Shadow {
  SharedAccess write;
  std::vector<SharedAccess> reads;
};

// Who read and who wrote each two bytes of a writable buffer in one launch: 1 + the thread's number in the grid, 0 for
// nobody. No kernel hands anything from one thread to another by way of global memory, so two of them are a race.
struct GlobalShadow {
  struct Free {
    void operator()(uint32_t* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint32_t[], Free> reader;
  std::unique_ptr<uint32_t[], Free> writer;
};

// An instruction of a warp: its threads' n-th accesses of one kind at one site. A warp's vectors and its single
// elements are of two kinds, because some of its threads may have a vector less and others an element more.
constexpr int kKinds = 2;

struct Request {
  std::vector<uintptr_t> sectors;
  int64_t bytes = 0;
};

struct Warp {
  float values[2][kWarp] = {};
  int masks[2] = {};
  int arrivals = 0;
  int generation = 0;
  std::vector<Request> requests[kSites][kKinds];
};

struct Block {
  std::vector<char> shared;
  std::vector<Shadow> shadows;  // one a word
  int arrivals = 0;
  int generation = 0;
};

struct Thread {
  Coordinates coordinates;
  Progress progress;
  int block;  // in the cluster
  int warp;   // in the cluster
  int lane;
  int seen[kSites][kKinds] = {};
  const int* waits_for = nullptr;  // goes on when *waits_for is no longer `waits_at`
  int waits_at = 0;
};

class Machine {
 public:
  Machine(const rmsnorm_emulated_buffer* buffers, int count, rmsnorm_emulated_report* report);

  void run(Kernel kernel, const KernelArgs& args, int64_t blocks, int threads, int cluster, int shared_bytes);

  // What a kernel asks for, in the fiber that runs.
  Thread& thread();
  void global(const char* at, int bytes, bool write, Site site, bool* allowed);
  char* shared(int rank, int offset, int bytes, bool write);
  float exchange(float value, int mask);
  void block_barrier();
  void cluster_arrive();
  void cluster_wait();

 private:
  void run_cluster(int64_t first_block);
  bool advance(int index);
  void wait(const int* counter);
  void fault(const std::string& what);
  void note_shared(Block& block, int offset, int bytes, bool write);
  void note_global(const rmsnorm_emulated_buffer& buffer, uintptr_t address, int bytes, bool write);
  void tally();

  const rmsnorm_emulated_buffer* buffers_;
  int buffer_count_;
  rmsnorm_emulated_report* report_;
  std::vector<GlobalShadow> shadows_;  // one a buffer
  Fibers fibers_;
  Kernel kernel_ = nullptr;
  KernelArgs args_{};
  int threads_ = 0;
  int cluster_ = 1;
  int64_t grid_ = 0;
  std::vector<Thread> all_;
  std::vector<Warp> warps_;
  std::vector<Block> blocks_;
  int cluster_arrivals_ = 0;
  int cluster_generation_ = 0;
};

}  // namespace rmsnorm::emulator
