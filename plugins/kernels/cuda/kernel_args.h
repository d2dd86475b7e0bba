// What a kernel is told at launch. Plain data, shared by the kernels, the launch table and the emulator.
#pragma once

#include <stdint.h>

namespace rmsnorm {

// The kernels' shapes: how a row is spread over threads and where it stays between its reading and its writing. All
// move 16-byte vectors; rows that don't begin or end at a 16-byte boundary have up to 30 single elements besides
// (rows.cuh).
enum class Layout {
  kMany,   // registers, one vector a thread of each of kManyRows aligned rows; the row fits in a warp
  kThin,   // registers, one vector a thread
  kThick,  // registers, up to kThickVectors a thread
  kLong,   // shared memory; what does not fit there is read again
  kSplit,  // slices of a row, each a block's, in two kernels: squares to the workspace, then the output; x is read
           // twice
};

constexpr int kManyRows = 4;
constexpr int kThickVectors = 4;
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr int kMaxCluster = 8;
constexpr int kSplitThreads = 256;
constexpr int kUnroll = 4;              // vectors of a thread in flight, where a row is gone through in turns
constexpr int kMostSplitBlocks = 1024;  // of all rows: a thread adds up no more than four slices' sums

// Two buffers of one partial sum a warp of the cluster: rows use them in turn, so that one barrier a row is enough.
constexpr int kPartialsPerRow = kMaxWarps * kMaxCluster;
constexpr int kPartialBytes = 2 * kPartialsPerRow * 4;

enum class EpsMode : int32_t { kInside = 0, kOutside = 1, kClamp = 2 };

// A vector is 16 bytes of x, and as many elements of the other tensors.
struct KernelArgs {
  const char* x;
  const char* skip;
  const char* scale;  // may be null: ones
  const char* bias;
  char* y;
  char* sum;       // may be null
  int64_t x_step;  // bytes from one row to the next
  int64_t skip_step;
  int64_t y_step;
  int64_t sum_step;
  int64_t rows;
  int64_t width;           // elements of a row
  const char* anchor;      // the tensor whose 16-byte boundaries rows are cut at: an output, if the kernel has one
  int64_t anchor_step;     // bytes from one row to the next
  int32_t anchor_shift;    // log2 of its elements' bytes
  float reciprocal_width;  // 1 / elements in a row
  float eps;
  EpsMode eps_mode;
  int32_t scale_is_one_element;
  int32_t bias_is_one_element;
  int32_t eps_is_tiny;  // a divisor may be below float32's normal numbers
  int32_t lanes;        // threads of a block that share a row
  int32_t lane_shift;   // log2(lanes) up to a warp; 31 where the whole block has one row
  int32_t cluster;      // blocks that share a row, a power of two
  int32_t cluster_shift;
  int32_t kept;  // kLong: vectors a thread keeps in shared memory
  // kSplit: one sum of squares a block, each float32; blocks a row, and the vectors of all of them but the last.
  char* partials;
  int32_t slices;
  int64_t slice_vectors;
};

}  // namespace rmsnorm
