// How a norm is spread over the device. Plain C++: no CUDA header is needed to choose a launch or to test the choice.
#pragma once

#include <stdint.h>

#include "kernel_args.h"

namespace rmsnorm {

// What a launch depends on of the device it is for.
struct Device {
  int compute;          // 90 for compute capability 9.0
  int multiprocessors;  //
  int shared_bytes;     // the most shared memory a block may ask for
};

// What it depends on of the work.
struct Problem {
  int64_t rows;
  int64_t width;      // elements
  int element_bytes;  // of x
  bool aligned;       // every row of every tensor starts at a multiple of 16 bytes and is made of whole 16-byte vectors
  bool may_split;     // there is a workspace, and with a residual a place for the sum
};

struct Launch {
  Layout layout;
  int threads;  // of a block
  int lanes;    // of them that share a row
  int cluster;  // blocks that share a row
  int kept;     // vectors a thread keeps in shared memory
  int shared_bytes;
  int slices;  // of a row, in the kSplit layouts
  int64_t slice_vectors;
  int64_t blocks;
  const char* reason;  // why, in the launch table's words
};

// Ways to overrule the table, for those who can time the result: TensorRT's tactics.
enum class Tactic : int {
  kTable = 1,      // the table's choice
  kSpread = 2,     // one vector a thread, a block a row
  kGathered = 3,   // as many vectors a thread as the registers hold, as few threads as that takes
  kClustered = 4,  // twice the blocks a row that the table takes
  kSplit = 5,      // few rows split over independent blocks
  kWhole = 6,      // no row split over independent blocks
};
constexpr int kTactics = 6;

// False where the tactic would not differ from the table's choice, or the device or the row forbids it.
bool tactic_applies(const Problem& problem, const Device& device, Tactic tactic);

// A tactic that does not apply is taken for kTable: any problem can be launched with any tactic.
Launch choose_launch(const Problem& problem, const Device& device, Tactic tactic);

// The workspace with which rows of this width may split on any device; 0 where none would.
int64_t split_workspace(int64_t width);

}  // namespace rmsnorm
