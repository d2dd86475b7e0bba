#include "machine.h"

#include <algorithm>
#include <cstdio>

namespace rmsnorm::emulator {
namespace {

constexpr uintptr_t kSector = 32;
constexpr int kVectorBytes = 16;
constexpr int kVectors = 0;  // kinds of requests
constexpr int kSingles = 1;
constexpr uint32_t kManyReaders = UINT32_MAX;
const char* const kSiteNames[kSites] = {"x",   "skip",    "scale",      "bias",        "y",
                                        "sum", "x again", "skip again", "partial sums"};

// True where `before` is known to have happened: some barrier lies between the two.
bool ordered(const SharedAccess& before, const Progress& now, bool same_block) {
  return (same_block && now.block > before.at.block) || now.waited > before.at.arrived;
}

int64_t shared_sectors(const Request& a, const Request& b) {
  return std::count_if(a.sectors.begin(), a.sectors.end(), [&](uintptr_t sector) {
    return std::find(b.sectors.begin(), b.sectors.end(), sector) != b.sectors.end();
  });
}

}  // namespace

Machine::Machine(const rmsnorm_emulated_buffer* buffers, int count, rmsnorm_emulated_report* report)
    : buffers_(buffers), buffer_count_(count), report_(report) {}

Thread& Machine::thread() { return all_[static_cast<size_t>(fibers_.running())]; }

void Machine::fault(const std::string& what) {
  if (report_->fault[0] != '\0') return;
  const Coordinates& at = all_[static_cast<size_t>(std::max(fibers_.running(), 0))].coordinates;
  std::snprintf(report_->fault, sizeof(report_->fault), "block %u, thread %u: %s", at.block.x, at.thread.x,
                what.c_str());
}

void Machine::global(const char* at, int bytes, bool write, Site site, bool* allowed) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  const int index = static_cast<int>(site);
  const std::string name = std::string(write ? "store to " : "load from ") + kSiteNames[index];
  *allowed = false;
  if (address % static_cast<uintptr_t>(bytes) != 0) return fault(name + ": misaligned");
  const auto* const end = buffers_ + buffer_count_;
  const auto* const found = std::find_if(buffers_, end, [&](const rmsnorm_emulated_buffer& buffer) {
    const auto base = reinterpret_cast<uintptr_t>(buffer.base);
    return address >= base && address + static_cast<uintptr_t>(bytes) <= base + static_cast<uintptr_t>(buffer.bytes) &&
           (!write || buffer.writable);
  });
  if (found == end) return fault(name + ": out of bounds");
  *allowed = true;
  if (found->writable) note_global(*found, address, bytes, write);

  Thread& self = thread();
  const int kind = bytes < kVectorBytes ? kSingles : kVectors;
  std::vector<Request>& requests = warps_[static_cast<size_t>(self.warp)].requests[index][kind];
  const auto turn = static_cast<size_t>(self.seen[index][kind]++);
  if (turn >= requests.size()) requests.resize(turn + 1);
  Request& request = requests[turn];
  request.bytes += bytes;
  const uintptr_t sector = address / kSector;
  if (std::find(request.sectors.rbegin(), request.sectors.rend(), sector) == request.sectors.rend()) {
    request.sectors.push_back(sector);
  }
}

void Machine::note_global(const rmsnorm_emulated_buffer& buffer, uintptr_t address, int bytes, bool write) {
  constexpr uintptr_t kGranule = 2;
  const Coordinates& at = thread().coordinates;
  const uint32_t self = 1 + at.block.x * at.block_size.x + at.thread.x;
  GlobalShadow& shadow = shadows_[static_cast<size_t>(&buffer - buffers_)];
  if (!shadow.reader) {
    const auto count = static_cast<size_t>(buffer.bytes) / kGranule + 1;
    // Zeros that take memory only where they are touched: a buffer may span gigabytes for the sake of its addresses.
    shadow.reader.reset(static_cast<uint32_t*>(std::calloc(count, sizeof(uint32_t))));
    shadow.writer.reset(static_cast<uint32_t*>(std::calloc(count, sizeof(uint32_t))));
    if (!shadow.reader || !shadow.writer) return fault("the emulator is out of memory");
  }
  const uintptr_t first = (address - reinterpret_cast<uintptr_t>(buffer.base)) / kGranule;
  for (uintptr_t i = first; i < first + (static_cast<uintptr_t>(bytes) + kGranule - 1) / kGranule; ++i) {
    uint32_t& reader = shadow.reader[i];
    uint32_t& writer = shadow.writer[i];
    if (writer != 0 && writer != self) fault("race in global memory with a store");
    if (write && reader != 0 && reader != self) fault("race in global memory with a load");
    if (write) {
      writer = self;
    } else {
      reader = reader == 0 || reader == self ? self : kManyReaders;
    }
  }
}

void Machine::note_shared(Block& block, int offset, int bytes, bool write) {
  const Thread& self = thread();
  const SharedAccess access{fibers_.running(), self.progress};
  const auto clashes = [&](const SharedAccess& before) {
    const bool same_block = before.thread >= 0 && all_[static_cast<size_t>(before.thread)].block == self.block;
    return before.thread >= 0 && before.thread != access.thread && !ordered(before, self.progress, same_block);
  };
  for (int word = offset / 4; word <= (offset + bytes - 1) / 4; ++word) {
    Shadow& shadow = block.shadows[static_cast<size_t>(word)];
    // Two 16-bit elements share a word without harm.
    const bool whole = bytes >= 4;
    if (whole && clashes(shadow.write)) fault("race in shared memory with a store");
    if (!write) {
      shadow.reads.push_back(access);
      continue;
    }
    if (whole && std::any_of(shadow.reads.begin(), shadow.reads.end(), clashes)) {
      fault("race in shared memory with a load");
    }
    shadow.write = access;
    shadow.reads.clear();
  }
}

char* Machine::shared(int rank, int offset, int bytes, bool write) {
  const int owner = rank < 0 ? thread().block : rank;
  if (owner >= cluster_) {
    fault("no such block in the cluster");
    return nullptr;
  }
  Block& block = blocks_[static_cast<size_t>(owner)];
  if (offset < 0 || offset + bytes > static_cast<int>(block.shared.size()) || offset % bytes != 0) {
    fault("shared memory: out of bounds or misaligned");
    return nullptr;
  }
  if (rank >= 0 && cluster_ > 1 && thread().progress.waited == 0) fault("store to a block that may not have started");
  note_shared(block, offset, bytes, write);
  return block.shared.data() + offset;
}

void Machine::wait(const int* counter) {
  Thread& self = thread();
  self.waits_for = counter;
  self.waits_at = *counter;
  fibers_.give_way();
}

float Machine::exchange(float value, int mask) {
  Thread& self = thread();
  Warp& warp = warps_[static_cast<size_t>(self.warp)];
  const int turn = warp.generation & 1;
  warp.values[turn][self.lane] = value;
  if (warp.arrivals == 0) warp.masks[turn] = mask;
  if (warp.masks[turn] != mask) fault("lanes of a warp in different shuffles");
  if (++warp.arrivals == kWarp) {
    warp.arrivals = 0;
    ++warp.generation;
  } else {
    wait(&warp.generation);
  }
  return warp.values[turn][self.lane ^ mask];
}

void Machine::block_barrier() {
  Thread& self = thread();
  Block& block = blocks_[static_cast<size_t>(self.block)];
  if (++block.arrivals == threads_) {
    block.arrivals = 0;
    ++block.generation;
    ++report_->barriers;
  } else {
    wait(&block.generation);
  }
  ++self.progress.block;
}

void Machine::cluster_arrive() {
  Progress& progress = thread().progress;
  if (progress.arrived != progress.waited) fault("arrived twice at the cluster's barrier");
  ++progress.arrived;
  if (++cluster_arrivals_ == threads_ * cluster_) {
    cluster_arrivals_ = 0;
    ++cluster_generation_;
    report_->barriers += cluster_;
  }
}

void Machine::cluster_wait() {
  Progress& progress = thread().progress;
  if (progress.arrived != progress.waited + 1) return fault("waited at the cluster's barrier without arriving");
  if (cluster_generation_ < progress.arrived) wait(&cluster_generation_);
  ++progress.waited;
}

bool Machine::advance(int index) {
  Thread& self = all_[static_cast<size_t>(index)];
  if (fibers_.ended(index) || (self.waits_for != nullptr && *self.waits_for == self.waits_at)) return false;
  self.waits_for = nullptr;
  fibers_.resume(index);
  return true;
}

void Machine::run_cluster(int64_t first_block) {
  const int total = threads_ * cluster_;
  for (int i = 0; i < total; ++i) {
    Thread& self = all_[static_cast<size_t>(i)];
    self = Thread{};
    self.block = i / threads_;
    self.warp = i / kWarp;
    self.lane = i % kWarp;
    self.coordinates = Coordinates{{static_cast<unsigned>(i % threads_)},
                                   {static_cast<unsigned>(first_block + self.block)},
                                   {static_cast<unsigned>(threads_)},
                                   {static_cast<unsigned>(grid_)}};
  }
  for (Warp& warp : warps_) {
    warp.arrivals = 0;
    for (auto& site : warp.requests) {
      for (auto& requests : site) requests.clear();
    }
  }
  for (Block& block : blocks_) {
    block.arrivals = 0;
    std::fill(block.shared.begin(), block.shared.end(), '\xff');
    std::fill(block.shadows.begin(), block.shadows.end(), Shadow{});
  }
  cluster_arrivals_ = 0;
  cluster_generation_ = 0;
  fibers_.prepare(
      total,
      [](void* self, int) {
        auto* const machine = static_cast<Machine*>(self);
        machine->kernel_(machine->args_);
      },
      this);
  for (bool any = true; any;) {
    any = false;
    for (int first = 0; first < total; first += kWarp) {
      // A warp runs until all its lanes wait for another warp: shuffles then cost no round over the block.
      for (bool some = true; some; any |= some) {
        some = false;
        for (int i = first; i < first + kWarp; ++i) some |= advance(i);
      }
    }
  }
  for (int i = 0; i < total; ++i) {
    if (!fibers_.ended(i)) fault("a thread waits for ever at a barrier or shuffle");
  }
  tally();
}

void Machine::tally() {
  for (const Warp& warp : warps_) {
    for (int site = 0; site < kSites; ++site) {
      rmsnorm_emulated_traffic& traffic = report_->traffic[site];
      traffic.single_requests += static_cast<int64_t>(warp.requests[site][kSingles].size());
      for (const std::vector<Request>& requests : warp.requests[site]) {
        for (const Request& request : requests) {
          traffic.bytes += request.bytes;
          traffic.requests += 1;
          traffic.sectors += static_cast<int64_t>(request.sectors.size());
          traffic.least_sectors += (request.bytes + static_cast<int64_t>(kSector) - 1) / static_cast<int64_t>(kSector);
          if (&request != requests.data()) traffic.cached_sectors += shared_sectors(request, *(&request - 1));
        }
      }
    }
  }
}

namespace {
thread_local Machine* machine = nullptr;
}

void Machine::run(Kernel kernel, const KernelArgs& args, int64_t blocks, int threads, int cluster, int shared_bytes) {
  kernel_ = kernel;
  args_ = args;
  threads_ = threads;
  cluster_ = cluster;
  grid_ = blocks;
  const auto total = static_cast<size_t>(threads) * static_cast<size_t>(cluster);
  all_.assign(total, Thread{});
  warps_ = std::vector<Warp>(total / kWarp);
  blocks_ = std::vector<Block>(static_cast<size_t>(cluster));
  for (Block& block : blocks_) {
    block.shared.resize(static_cast<size_t>(shared_bytes));
    block.shadows.resize(static_cast<size_t>(shared_bytes + 3) / 4);
  }
  shadows_ = std::vector<GlobalShadow>(static_cast<size_t>(buffer_count_));
  machine = this;
  for (int64_t first = 0; first < blocks && report_->fault[0] == '\0'; first += cluster) run_cluster(first);
  machine = nullptr;
}

const Coordinates& here() { return machine->thread().coordinates; }

void read_global(const char* from, void* to, int bytes, Site site) {
  bool allowed = false;
  machine->global(from, bytes, false, site, &allowed);
  if (allowed) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  } else {
    std::memset(to, 0, static_cast<size_t>(bytes));
  }
}

void write_global(char* to, const void* from, int bytes, Site site) {
  bool allowed = false;
  machine->global(to, bytes, true, site, &allowed);
  if (allowed) std::memcpy(to, from, static_cast<size_t>(bytes));
}

void read_shared(int offset, void* to, int bytes) {
  const char* const from = machine->shared(-1, offset, bytes, false);
  if (from != nullptr) std::memcpy(to, from, static_cast<size_t>(bytes));
}

void write_shared(int rank, int offset, const void* from, int bytes) {
  char* const to = machine->shared(rank, offset, bytes, true);
  if (to != nullptr) std::memcpy(to, from, static_cast<size_t>(bytes));
}

float exchange(float value, int mask) { return machine->exchange(value, mask); }
void block_barrier() { machine->block_barrier(); }
void cluster_arrive() { machine->cluster_arrive(); }
void cluster_wait() { machine->cluster_wait(); }

// Round to nearest, ties to even, by way of integers; NaN becomes the quiet NaN that the device gives.
uint16_t half_from(float value) {
  const uint32_t bits = float_to_bits(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7fff;
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  }
  const uint32_t rounded = (bits & 0x7fffffffu) + 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float half_to(uint16_t raw) {
  const uint32_t exponent = (raw >> 10) & 31u;
  const uint32_t fraction = raw & 0x3ffu;
  const float sign = (raw & 0x8000u) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return sign * (fraction != 0 ? NAN : INFINITY);
  if (exponent == 0) return sign * static_cast<float>(fraction) * 0x1p-24f;
  return sign * bits_to_float(((exponent + 112u) << 23) | (fraction << 13));
}

uint16_t bfloat_from(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = float_to_bits(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace rmsnorm::emulator
