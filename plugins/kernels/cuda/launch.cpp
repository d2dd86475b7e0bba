#include "launch.h"

#include <algorithm>

#include "launch_table.h"

namespace rmsnorm {
namespace {

constexpr int kNarrowThreads = 128;  // of a block whose rows each take a warp or less
// Of a block with a row in shared memory, where rows are many: two such blocks fit a multiprocessor's registers.
constexpr int kLongThreads = 256;
constexpr int kResidentThreads = 2048;  // of a multiprocessor; a smaller one merely queues more blocks
constexpr int kWavesOfBlocks = 2;       // more rows than this many blocks loop, and load the parameters once
constexpr int kMostSplitRows = kMostSplitBlocks / 2;
constexpr int kVectorBytes = 16;
constexpr int64_t kSplitStep = 32;           // vectors: slices are whole warps' loads
constexpr int64_t kMostBlocks = 0x7fffffff;  // the hardware's limit, in whole clusters below

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int power_of_two_from(int64_t least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

int per_thread(Layout layout) { return layout == Layout::kThick ? kThickVectors : 1; }

// The most whole vectors that a row has, wherever it begins; at least one, so that there is something to share out.
int64_t vectors_of(const Problem& problem) {
  return std::max<int64_t>(problem.width * problem.element_bytes / kVectorBytes, 1);
}

bool fits(const Rule& rule, const Problem& problem, const Device& device) {
  return (problem.aligned || !rule.aligned_only) && vectors_of(problem) <= rule.most_vectors &&
         device.compute >= rule.least_compute &&
         (rule.least_sms_a_row == 0 || problem.rows <= device.multiprocessors / rule.least_sms_a_row) &&
         (rule.spread != Spread::kSlices || (problem.may_split && problem.rows <= kMostSplitRows));
}

const Rule& rule_for(const Problem& problem, const Device& device) {
  const Rule* found = kRules;
  while (!fits(*found, problem, device)) ++found;  // the last entry takes anything
  return *found;
}

// Lanes of a warp a row, and as many rows a block as still give every multiprocessor a block.
void spread_over_lanes(Launch& launch, const Problem& problem, const Device& device, int64_t vectors) {
  // The single elements of an unaligned row want a warp.
  const int64_t wanted = problem.aligned ? ceil_div(vectors, per_thread(launch.layout)) : 32;
  launch.lanes = power_of_two_from(std::min<int64_t>(wanted, 32));
  const int64_t share = ceil_div(problem.rows, device.multiprocessors) * launch.lanes;
  launch.threads = static_cast<int>(std::min<int64_t>(ceil_div(share, 32) * 32, kNarrowThreads));
}

int64_t rows_a_block(const Launch& launch) {
  const int64_t slots = launch.lanes <= 32 ? launch.threads / launch.lanes : 1;
  return launch.layout == Layout::kMany ? slots * kManyRows : slots;
}

int block_lanes(int64_t vectors, int64_t each) {
  const int64_t warps = ceil_div(ceil_div(vectors, each), 32);
  // At least two warps: up to one is another spread, with other rules for the shuffles.
  return static_cast<int>(std::clamp<int64_t>(warps, 2, kMaxWarps)) * 32;
}

int64_t kept_bytes(const Launch& launch, int64_t vectors) {
  return ceil_div(vectors, int64_t{launch.threads} * launch.cluster) * launch.threads * kVectorBytes + kPartialBytes;
}

// The smallest cluster whose shared memory holds the row with two blocks a multiprocessor, so that one reads while the
// other writes; else the smallest that holds it at all; else the largest.
int long_cluster(Launch launch, const Device& device, int64_t vectors, int largest) {
  for (const int share : {2, 1}) {
    for (int cluster = 1; cluster <= largest; cluster *= 2) {
      launch.cluster = cluster;
      if (kept_bytes(launch, vectors) <= device.shared_bytes / share) return cluster;
    }
  }
  return largest;
}

int fill_cluster(const Problem& problem, const Device& device, int64_t vectors) {
  int cluster = power_of_two_from(ceil_div(vectors, kThickBlock));
  while (cluster < kMaxCluster && problem.rows * cluster * 2 <= device.multiprocessors &&
         vectors >= int64_t{cluster} * 2 * kFillVectors) {
    cluster *= 2;
  }
  return cluster;
}

void spread_over_blocks(Launch& launch, Spread spread, const Problem& problem, const Device& device, int64_t vectors) {
  if (launch.layout == Layout::kLong) {
    launch.threads = problem.rows <= device.multiprocessors ? kMaxThreads : kLongThreads;
    const int largest = spread == Spread::kBlock ? 1 : kMaxCluster;
    launch.cluster = long_cluster(launch, device, vectors, largest);
  } else if (spread == Spread::kClusterToFill) {
    launch.cluster = fill_cluster(problem, device, vectors);
  } else if (spread == Spread::kCluster) {
    launch.cluster = power_of_two_from(ceil_div(vectors, int64_t{kMaxThreads} * per_thread(launch.layout)));
  }
  if (launch.layout != Layout::kLong) {
    launch.threads = block_lanes(ceil_div(vectors, launch.cluster), per_thread(launch.layout));
  }
  launch.lanes = launch.threads;
}

// A slice for each multiprocessor, as long as all its threads have something to do, and more where a thread would have
// more than one batch of loads.
void spread_over_slices(Launch& launch, const Problem& problem, const Device& device, int64_t vectors) {
  launch.threads = launch.lanes = kSplitThreads;
  const int64_t most = kMostSplitBlocks / problem.rows;
  const int64_t filling = std::min(ceil_div(vectors, kSplitThreads), device.multiprocessors / problem.rows);
  const int64_t wanted = std::max(ceil_div(vectors, kSplitThreads * kUnroll), filling);
  const int64_t slices = std::clamp<int64_t>(wanted, 1, most);
  launch.slice_vectors = ceil_div(ceil_div(vectors, slices), kSplitStep) * kSplitStep;
  launch.slices = static_cast<int>(ceil_div(vectors, launch.slice_vectors));
}

// Memory for the row where it stays in shared memory, and for the partial sums wherever more than a warp adds them.
void claim_shared(Launch& launch, const Device& device, int64_t vectors) {
  if (launch.lanes > 32) launch.shared_bytes = kPartialBytes;
  if (launch.layout != Layout::kLong) return;
  const int64_t a_vector = int64_t{launch.threads} * kVectorBytes;
  const int64_t room = (device.shared_bytes - kPartialBytes) / a_vector;
  launch.kept = static_cast<int>(std::min(room, ceil_div(vectors, int64_t{launch.threads} * launch.cluster)));
  launch.shared_bytes += static_cast<int>(launch.kept * a_vector);
}

Launch launch_by(const Rule& rule, const Problem& problem, const Device& device, int cluster_factor) {
  const int64_t vectors = vectors_of(problem);
  Launch launch{rule.layout, 0, 0, 1, 0, 0, 0, 0, 0, rule.reason};
  if (rule.spread == Spread::kSlices) {
    spread_over_slices(launch, problem, device, vectors);
  } else if (rule.spread == Spread::kLanes) {
    spread_over_lanes(launch, problem, device, vectors);
  } else {
    spread_over_blocks(launch, rule.spread, problem, device, vectors);
  }
  if (cluster_factor > 1) {
    launch.cluster *= cluster_factor;
    if (launch.layout != Layout::kLong) {
      launch.threads = block_lanes(ceil_div(vectors, launch.cluster), per_thread(launch.layout));
    }
    launch.lanes = launch.threads;
  }
  claim_shared(launch, device, vectors);
  if (launch.slices > 0) {
    launch.blocks = problem.rows * launch.slices;
    return launch;
  }
  const int64_t groups = ceil_div(problem.rows, rows_a_block(launch));
  const int64_t waves = int64_t{device.multiprocessors} * (kResidentThreads / launch.threads) * kWavesOfBlocks;
  const int64_t most = std::min(std::max<int64_t>(waves, launch.cluster), kMostBlocks) / launch.cluster;
  launch.blocks = std::min(groups, most) * launch.cluster;
  return launch;
}

Rule ruled(Layout layout, Spread spread, const char* reason) { return Rule{false, kAny, 0, 0, layout, spread, reason}; }

bool splits(const Rule& rule) { return rule.spread == Spread::kSlices; }

Problem unsplit(Problem problem) {
  problem.may_split = false;
  return problem;
}

}  // namespace

bool tactic_applies(const Problem& problem, const Device& device, Tactic tactic) {
  if (tactic == Tactic::kTable) return true;
  if (problem.rows < 1 || problem.width < 1) return false;
  const int64_t vectors = vectors_of(problem);
  const Rule& rule = rule_for(problem, device);
  switch (tactic) {
    case Tactic::kSpread:
      return rule.layout != Layout::kThin && vectors > 32 && vectors <= kMaxThreads;
    case Tactic::kGathered:
      return rule.layout == Layout::kThin;
    case Tactic::kClustered:
      return device.compute >= 90 && rule.spread != Spread::kLanes && !splits(rule) && vectors >= 1024 &&
             choose_launch(problem, device, Tactic::kTable).cluster < kMaxCluster;
    case Tactic::kSplit:
      return !splits(rule) && problem.may_split && problem.rows <= std::min(device.multiprocessors / 2, kMostSplitRows);
    case Tactic::kWhole:
      return splits(rule);
    default:
      return false;
  }
}

Launch choose_launch(const Problem& problem, const Device& device, Tactic tactic) {
  const Rule& rule = rule_for(problem, device);
  if (tactic == Tactic::kTable || !tactic_applies(problem, device, tactic)) return launch_by(rule, problem, device, 1);
  const char* const reason = "asked for by tactic";
  switch (tactic) {
    case Tactic::kSpread:
      return launch_by(ruled(Layout::kThin, Spread::kBlock, reason), problem, device, 1);
    case Tactic::kGathered:
      return launch_by(ruled(Layout::kThick, vectors_of(problem) <= 128 ? Spread::kLanes : Spread::kBlock, reason),
                       problem, device, 1);
    case Tactic::kSplit:
      return launch_by(ruled(Layout::kSplit, Spread::kSlices, reason), problem, device, 1);
    case Tactic::kWhole:
      return launch_by(rule_for(unsplit(problem), device), problem, device, 1);
    default:
      return launch_by(rule, problem, device, 2);
  }
}

int64_t split_workspace(int64_t width) { return width < kLeastSplitWidth ? 0 : int64_t{kMostSplitBlocks} * 4; }

}  // namespace rmsnorm
