// The launch table: the first entry that a problem fits decides. Every entry says why it is there.
//
// "Few rows" is measured against the multiprocessors: below one row each the card is not full whatever a block does,
// and the time is the latency of one row; above it, bandwidth decides, and what counts is bytes in flight (a
// multiprocessor of an H200 needs about 30 KB of them) and few barriers.
//
// Why no entry splits a row over independent blocks: it takes either a second kernel or a wait for other blocks, and a
// workspace that nobody has given us (allocating is not ours to do). From sm_90 a cluster does the same in one launch
// with x read once. Before it, a row that fills no cluster-less card is one of more than 64 KB with fewer rows than
// multiprocessors: one block streams it at its multiprocessor's share of the bandwidth, as every library does today.
#pragma once

#include <stdint.h>

#include "kernel_args.h"

namespace rmsnorm {

enum class Spread {
  kLanes,          // the fewest lanes of a warp (a power of two) that hold the row; many rows a block
  kBlock,          // the fewest warps that hold the row; one row a block
  kCluster,        // the fewest blocks that hold the row
  kClusterToFill,  // as many blocks as there are idle multiprocessors, as long as each has kFillVectors
};

constexpr int64_t kAny = INT64_MAX;
constexpr int kFillVectors =
    512;  // one vector for each thread of a full block: less is not worth the cluster's barrier

struct Rule {
  bool aligned;
  int64_t most_vectors;    // in a row: 16 bytes each where aligned, else single elements
  int64_t most_rows_a_sm;  // rows <= this many times the multiprocessors
  int least_compute;
  Layout layout;
  Spread spread;
  const char* reason;
};

constexpr int64_t kThickBlock = int64_t{kMaxThreads} * kThickVectors;     // 32 KB: what the registers of a block hold
constexpr int64_t kSingleBlock = int64_t{kMaxThreads} * kSingleElements;  // the same, element by element

constexpr Rule kRules[] = {
    {true, 32, kAny, 0, Layout::kMany, Spread::kLanes,
     "narrow: a row fits in some lanes of a warp; four rows a thread keep 64 bytes in flight, and their shuffles "
     "overlap"},
    {true, 512, 1, 0, Layout::kThin, Spread::kBlock,
     "few rows: latency decides; all loads of a row are issued at once, one a thread"},
    {true, 128, kAny, 0, Layout::kThick, Spread::kLanes,
     "a row fits in one warp's registers: no barrier, and 64 bytes a thread in flight"},
    {true, kThickBlock - 1, kAny, 0, Layout::kThick, Spread::kBlock,
     "a row fits in one block's registers: one barrier a row, several blocks a multiprocessor hide it"},
    {true, int64_t{kMaxCluster} * kThickBlock, 1, 90, Layout::kThick, Spread::kClusterToFill,
     "few long rows: a cluster brings the idle multiprocessors in, and the row stays in registers"},
    {true, kThickBlock, kAny, 0, Layout::kThick, Spread::kBlock, "the row just fills one block's registers"},
    {true, int64_t{kMaxCluster} * kThickBlock, kAny, 90, Layout::kThick, Spread::kCluster,
     "longer than a block's registers: the fewest blocks of a cluster whose registers hold it"},
    {true, kAny, kAny, 90, Layout::kLong, Spread::kCluster,
     "longer than a cluster's registers: the cluster's shared memory holds up to 1.7 MB of it"},
    {true, kAny, kAny, 0, Layout::kLong, Spread::kBlock,
     "no clusters: one block's shared memory holds what it can, the rest is read twice"},
    {false, 256, kAny, 0, Layout::kSingle, Spread::kLanes,
     "unaligned and narrow: element by element, neighbouring lanes on neighbouring elements"},
    {false, kSingleBlock, kAny, 0, Layout::kSingle, Spread::kBlock, "unaligned: a block's registers hold the row"},
    {false, int64_t{kMaxCluster} * kSingleBlock, kAny, 90, Layout::kSingle, Spread::kCluster,
     "unaligned and long: the fewest blocks of a cluster whose registers hold it"},
    {false, kAny, kAny, 90, Layout::kLongSingle, Spread::kCluster, "unaligned, longer than a cluster's registers"},
    {false, kAny, kAny, 0, Layout::kLongSingle, Spread::kBlock, "unaligned and long, on a card without clusters"},
};

}  // namespace rmsnorm
