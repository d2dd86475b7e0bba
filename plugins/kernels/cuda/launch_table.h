// The launch table: the first entry that a problem fits decides. Every entry says why it is there.
//
// "Few rows" is measured against the multiprocessors: below one row each the card is not full whatever a block does,
// and the time is the latency of one row; above it, bandwidth decides, and what counts is bytes in flight (a
// multiprocessor of an H200 needs about 30 KB of them) and few barriers.
//
// A split over independent blocks ("slices") is two kernels with a workspace between them, of which the second reads x
// again, from the second-level cache as long as the rows fit there. It costs a second launch, about a microsecond (less
// from sm_90, where it starts early), and one more trip to memory. A block or cluster goes through a long row in steps
// of a trip each, so that a split pays from about four steps on, where at least four times as many multiprocessors
// take part. Without a workspace from the caller its entries do not count.
#pragma once

#include <stdint.h>

#include "kernel_args.h"

namespace rmsnorm {

enum class Spread {
  kLanes,          // the fewest lanes of a warp (a power of two) that hold the row; many rows a block
  kBlock,          // the fewest warps that hold the row; one row a block
  kCluster,        // the fewest blocks that hold the row
  kClusterToFill,  // as many blocks as there are idle multiprocessors, as long as each has kFillVectors
  kSlices,         // independent blocks a row, as many as there are idle multiprocessors
};

constexpr int64_t kAny = INT64_MAX;
constexpr int kFillVectors =
    512;  // one vector for each thread of a full block: less is not worth the cluster's barrier

struct Rule {
  bool aligned_only;
  int64_t most_vectors;  // in a row, of 16 bytes
  int least_sms_a_row;   // rows times this are no more than the multiprocessors; 0: any number of rows
  int least_compute;
  Layout layout;
  Spread spread;
  const char* reason;
};

constexpr int64_t kThickBlock = int64_t{kMaxThreads} * kThickVectors;  // 32 KB: what the registers of a block hold
// Where a split pays: four steps of one block, or two of a cluster, whose steps are those of eight multiprocessors.
constexpr int64_t kSplitVectors = 4 * kThickBlock;
constexpr int64_t kClusterSplitVectors = 2 * kMaxCluster * kThickBlock;
constexpr int64_t kLeastSplitWidth = 16384;  // elements: shorter rows are not split by any tactic either

constexpr Rule kRules[] = {
    {true, 32, 0, 0, Layout::kMany, Spread::kLanes,
     "narrow: a row fits in some lanes of a warp; four rows a thread keep 64 bytes in flight, and their shuffles "
     "overlap"},
    {false, 32, 0, 0, Layout::kThin, Spread::kLanes,
     "narrow, and some row does not begin and end at 16-byte boundaries: a warp a row holds it, single elements "
     "included"},
    {false, 512, 1, 0, Layout::kThin, Spread::kBlock,
     "few rows: latency decides; all loads of a row are issued at once, one a thread"},
    {false, 128, 0, 0, Layout::kThick, Spread::kLanes,
     "a row fits in one warp's registers: no barrier, and 64 bytes a thread in flight"},
    {false, kThickBlock - 1, 0, 0, Layout::kThick, Spread::kBlock,
     "a row fits in one block's registers: one barrier a row, several blocks a multiprocessor hide it"},
    {false, kMaxCluster * kThickBlock, 1, 90, Layout::kThick, Spread::kClusterToFill,
     "few long rows: a cluster brings the idle multiprocessors in, and the row stays in registers"},
    {false, kThickBlock, 0, 0, Layout::kThick, Spread::kBlock, "the row just fills one block's registers"},
    {false, kMaxCluster * kThickBlock, 0, 90, Layout::kThick, Spread::kCluster,
     "longer than a block's registers: the fewest blocks of a cluster whose registers hold it"},
    {false, kClusterSplitVectors - 1, 0, 90, Layout::kLong, Spread::kCluster,
     "longer than a cluster's registers, and too short for a second launch to pay: its shared memory holds it"},
    {false, kAny, 16, 90, Layout::kSplit, Spread::kSlices,
     "few rows of 512 KB or more: even clusters would leave half of the multiprocessors idle"},
    {false, kAny, 0, 90, Layout::kLong, Spread::kCluster,
     "longer than a cluster's registers: the cluster's shared memory holds up to 1.7 MB of it"},
    {false, kSplitVectors - 1, 0, 0, Layout::kLong, Spread::kBlock,
     "no clusters, and too short for a second launch to pay: one block's shared memory holds what it can"},
    {false, kAny, 4, 0, Layout::kSplit, Spread::kSlices,
     "no clusters, and few rows of 128 KB or more: a block a row would leave most multiprocessors idle"},
    {false, kAny, 0, 0, Layout::kLong, Spread::kBlock,
     "no clusters: one block's shared memory holds what it can, the rest is read twice"},
};

}  // namespace rmsnorm
