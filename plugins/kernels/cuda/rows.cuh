// A row in memory: single elements up to the first 16-byte boundary (its head), 16-byte vectors, and single elements
// again (its tail). Where every row of every tensor is aligned and whole (ALIGNED) there are vectors alone, and what
// follows about the others is gone at compile time.
//
// The boundary is the output's, whose stores can't overlap. Tensors that lie in another phase to it (the scale of a row
// that starts anywhere; an x that is a slice of something) are loaded as the two or three aligned 16-byte words that
// hold a vector, and shifted into place. For these, head and tail each take in one vector more, so that no word reaches
// beyond the row.
#pragma once

#include "kernel_args.h"
#include "numbers.cuh"

namespace rmsnorm {

// Where a thread stands: which of the block's rows, which of the row's threads.
struct Place {
  int lane;     // among the row's threads in this block
  int slot;     // which of the block's rows
  int rank;     // of the block in its cluster
  int stride;   // threads of the whole cluster that share the row
  int column0;  // the row's first vector that is this thread's
};

RMSNORM_DEVICE Place place_of(const KernelArgs& args) {
  Place place;
  const int thread = static_cast<int>(threadIdx.x);
  place.slot = thread >> args.lane_shift;
  place.lane = thread & static_cast<int>((1u << args.lane_shift) - 1u);
  place.rank = static_cast<int>(blockIdx.x) & (args.cluster - 1);
  place.stride = args.lanes << args.cluster_shift;
  place.column0 = place.rank * args.lanes + place.lane;
  return place;
}

// How a row is taken apart: `head` elements, `vectors` and `tail` elements.
struct Grid {
  int64_t vectors;
  int head;
  int tail;
};

// Bytes from the last 16-byte boundary to `at`.
template <bool ALIGNED>
RMSNORM_DEVICE int late_by(const char* at) {
  return ALIGNED ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(at) & 15u);
}

// Elements in front of the anchor's first boundary.
template <int VEC>
RMSNORM_DEVICE int head_of(const KernelArgs& args, int64_t row) {
  const auto anchor = reinterpret_cast<uintptr_t>(args.anchor + row * args.anchor_step);
  return static_cast<int>((0 - (anchor >> args.anchor_shift)) & (VEC - 1));
}

template <int VEC>
RMSNORM_DEVICE Grid cut(int64_t width, int head, bool shifted) {
  const int more = shifted ? VEC : 0;
  Grid grid;
  grid.head = static_cast<int>(width < head + more ? width : head + more);
  const int64_t left = width - grid.head;
  const int64_t tail = (left & (VEC - 1)) + more;
  grid.tail = static_cast<int>(left < tail ? left : tail);
  grid.vectors = (left - grid.tail) / VEC;
  return grid;
}

// How many of the `left` vectors are in a batch of `most`: few enough for an int.
RMSNORM_DEVICE int batch_of(int64_t left, int most) { return static_cast<int>(left < most ? left : most); }

// Head and tail are shared out to the row's first threads, one element each: this is the thread's, or -1. A row has
// kMostSingles threads or more.
template <int VEC>
constexpr int kMostSingles = 4 * VEC;

template <int VEC>
RMSNORM_DEVICE int64_t single_of(const Grid& grid, const Place& place, int64_t width) {
  if (place.column0 < grid.head) return place.column0;
  const int behind = place.column0 - kMostSingles<VEC> / 2;
  return behind >= 0 && behind < grid.tail ? width - grid.tail + behind : -1;
}

// One vector: `late` bytes behind a boundary, where all the 16-byte words that it touches may be read.
template <class T, int VEC>
RMSNORM_DEVICE Pack<T, VEC> load_shifted(const char* at, int late, Site site) {
  return shifted_down<T>(load_global<VEC * T::kBytes + 16>(at - late, site), late);
}

template <class T, int VEC, bool ALIGNED>
RMSNORM_DEVICE Pack<T, VEC> load_vector(const char* at, Site site) {
  const int late = late_by<ALIGNED>(at);
  return late == 0 ? load_global<VEC * T::kBytes>(at, site) : load_shifted<T, VEC>(at, late, site);
}

// A thread's N vectors of the `vectors` from `from` on; what lies beyond them is zero.
template <class T, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void load_vectors(Pack<T, VEC> (&out)[N], const char* from, const Place& place, int vectors, Site site) {
  constexpr int kBytes = VEC * T::kBytes;
  const int late = late_by<ALIGNED>(from);
  if (late == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int column = place.column0 + i * place.stride;
      out[i] = Pack<T, VEC>{};
      if (column < vectors) out[i] = load_global<kBytes>(from + int64_t{column} * kBytes, site);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int column = place.column0 + i * place.stride;
      out[i] = Pack<T, VEC>{};
      if (column < vectors) out[i] = load_shifted<T, VEC>(from + int64_t{column} * kBytes, late, site);
    }
  }
}

// One vector; element by element where the tensor's phase is not the anchor's.
template <class T, int VEC, bool ALIGNED>
RMSNORM_DEVICE void store_vector(char* to, const Pack<T, VEC>& in, Site site) {
  if (late_by<ALIGNED>(to) == 0) {
    store_global<VEC * T::kBytes>(to, in, site);
  } else {
#pragma unroll
    for (int i = 0; i < VEC; ++i) store_global<T::kBytes>(to + i * T::kBytes, element_of<T, VEC>(in, i), site);
  }
}

template <class T, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void store_vectors(char* to, const Pack<T, VEC> (&in)[N], const Place& place, int vectors, Site site) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    if (column < vectors) store_vector<T, VEC, ALIGNED>(to + int64_t{column} * (VEC * T::kBytes), in[i], site);
  }
}

}  // namespace rmsnorm
