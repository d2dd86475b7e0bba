// What a thread reads and writes of each tensor: its vectors of a batch, and the single element that it has of its row.
#pragma once

#include "norm.cuh"

namespace rmsnorm {

// A scale or bias.
struct Parameter {
  const char* from;  // null: `absent` for every element
  bool one_element;
  float absent;

  // Whether there is nothing to read along the row.
  RMSNORM_DEVICE bool everywhere() const { return from == nullptr || one_element; }
};

RMSNORM_DEVICE Parameter scale_of(const KernelArgs& args) {
  return Parameter{args.scale, args.scale_is_one_element != 0, 1.0f};
}

RMSNORM_DEVICE Parameter bias_of(const KernelArgs& args) {
  return Parameter{args.bias, args.bias_is_one_element != 0, 0.0f};
}

// A vector of what it is everywhere.
template <class U, int VEC>
RMSNORM_DEVICE Pack<U, VEC> filled(const Parameter& parameter, Site site) {
  float value = parameter.absent;
  if (parameter.from != nullptr) value = U::up(load_global<U::kBytes>(parameter.from, site).word[0]);
  float values[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = value;
  return pack<U, VEC>(values);
}

// A thread's N vectors of the `vectors` from the row's `element` on.
template <class U, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void load_parameter(Pack<U, VEC> (&out)[N], const Parameter& parameter, int64_t element,
                                   const Place& place, int vectors, Site site) {
  if (!parameter.everywhere()) {
    load_vectors<U, VEC, N, ALIGNED>(out, parameter.from + element * U::kBytes, place, vectors, site);
  } else {
    const Pack<U, VEC> all = filled<U, VEC>(parameter, site);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = all;
  }
}

// One vector, or one element.
template <class U, int VEC, bool ALIGNED>
RMSNORM_DEVICE Pack<U, VEC> parameter_at(const Parameter& parameter, int64_t element, Site site) {
  if (parameter.everywhere()) return filled<U, VEC>(parameter, site);
  return load_vector<U, VEC, ALIGNED>(parameter.from + element * U::kBytes, site);
}

// Vectors of a thread that are written at once: as many as are read at once, where parameters are no wider than x.
template <class V>
constexpr int kWriteUnroll = kUnroll * V::T::kBytes / V::U::kBytes;

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Grid grid_of(const KernelArgs& args, int64_t row) {
  const int64_t width = row < args.rows ? args.width : 0;
  if constexpr (ALIGNED) return Grid{width / VEC, 0, 0};
  const int head = head_of<VEC>(args, row);
  const int64_t bytes = int64_t{head} * V::T::kBytes;
  const int64_t parameter_bytes = int64_t{head} * V::U::kBytes;
  int late = late_by<ALIGNED>(args.x + row * args.x_step + bytes);
  if (V::kSkip) late |= late_by<ALIGNED>(args.skip + row * args.skip_step + bytes);
  if (!scale_of(args).everywhere()) late |= late_by<ALIGNED>(args.scale + parameter_bytes);
  if (V::kBias && !bias_of(args).everywhere()) late |= late_by<ALIGNED>(args.bias + parameter_bytes);
  return cut<VEC>(width, head, late != 0);
}

// A row of each tensor, from its element `first` on.
struct RowAt {
  const char* x;
  const char* skip;
  char* y;
  char* sum;  // null where nobody wants it
};

template <class V>
RMSNORM_DEVICE RowAt row_at(const KernelArgs& args, int64_t row, int64_t first) {
  const int64_t bytes = first * V::T::kBytes;
  RowAt at{};
  at.x = args.x + row * args.x_step + bytes;
  at.y = args.y + row * args.y_step + first * OutputOf<V>::Type::kBytes;
  if constexpr (V::kSkip) {
    at.skip = args.skip + row * args.skip_step + bytes;
    if (args.sum != nullptr) at.sum = args.sum + row * args.sum_step + bytes;
  }
  return at;
}

// The bias of vectors from the row's `element` on, loaded with its use: registers for all of a thread's are rarely
// there.
template <class V, int VEC, bool ALIGNED>
struct LoadedBias {
  const KernelArgs& args;
  int64_t element;

  RMSNORM_DEVICE Pack<typename V::U, VEC> operator()(int, int column) const {
    if constexpr (!V::kBias) return {};
    return parameter_at<typename V::U, VEC, ALIGNED>(bias_of(args), element + int64_t{column} * VEC, Site::kBias);
  }
};

// bias(i, column): that of the thread's i-th vector, which is the row's `column`-th from `to` on.
template <class V, int VEC, int N, bool ALIGNED, class Bias>
RMSNORM_DEVICE void store_outputs(char* to, const Pack<typename V::T, VEC> (&x)[N],
                                  const Pack<typename V::U, VEC> (&scale)[N], const Bias& bias, float factor,
                                  const KernelArgs& args, const Place& place, int vectors) {
  constexpr int kBytes = VEC * OutputOf<V>::Type::kBytes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    if (column >= vectors) continue;
    store_output<V, VEC, ALIGNED>(to + int64_t{column} * kBytes, x[i], scale[i], bias(i, column), factor, args);
  }
}

// Adds a thread's N vectors of skip to those of x.
template <class T, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void add_vectors(Pack<T, VEC> (&x)[N], const char* skip, const Place& place, int vectors) {
  constexpr int kBytes = VEC * T::kBytes;
  const int late = late_by<ALIGNED>(skip);
  if (late == 0) {
    Pack<T, VEC> added[N];
    load_vectors<T, VEC, N, true>(added, skip, place, vectors, Site::kSkip);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = summed<T, VEC>(x[i], added[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int column = place.column0 + i * place.stride;
      if (column >= vectors) continue;
      x[i] = summed<T, VEC>(x[i], load_shifted<T, VEC>(skip + int64_t{column} * kBytes, late, Site::kSkip));
    }
  }
}

// A thread's N vectors of x, or of the sum with skip, which is stored.
template <class V, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void read_vectors(Pack<typename V::T, VEC> (&x)[N], const RowAt& at, const Place& place, int vectors) {
  using T = typename V::T;
  load_vectors<T, VEC, N, ALIGNED>(x, at.x, place, vectors, Site::kX);
  if constexpr (V::kSkip) {
    add_vectors<T, VEC, N, ALIGNED>(x, at.skip, place, vectors);
    if (at.sum != nullptr) store_vectors<T, VEC, N, ALIGNED>(at.sum, x, place, vectors, Site::kSum);
  }
}

// The element of its row's head or tail that a thread has.
template <class T>
struct Single {
  int64_t element = -1;  // of the row; -1: none
  Pack<T, 1> x{};
  Pack<T, 1> skip{};
};

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Single<typename V::T> load_single(const KernelArgs& args, const Grid& grid, const Place& place,
                                                 int64_t row, Site site) {
  using T = typename V::T;
  Single<T> single;
  if constexpr (ALIGNED) return single;
  single.element = single_of<VEC>(grid, place, args.width);
  if (single.element < 0) return single;
  const RowAt at = row_at<V>(args, row, single.element);
  single.x = load_global<T::kBytes>(at.x, site);
  if constexpr (V::kSkip) single.skip = load_global<T::kBytes>(at.skip, Site::kSkip);
  return single;
}

// Adds its skip, stores the sum, and adds its square to `total`.
template <class V>
RMSNORM_DEVICE float square_single(Single<typename V::T>& single, const KernelArgs& args, int64_t row, float total) {
  using T = typename V::T;
  if (single.element < 0) return total;
  if constexpr (V::kSkip) {
    single.x = summed<T, 1>(single.x, single.skip);
    const RowAt at = row_at<V>(args, row, single.element);
    if (at.sum != nullptr) store_global<T::kBytes>(at.sum, single.x, Site::kSum);
  }
  return squares<T, 1>(single.x, total);
}

template <class V>
RMSNORM_DEVICE void store_single(const Single<typename V::T>& single, const KernelArgs& args, int64_t row,
                                 float factor) {
  if (single.element < 0) return;
  const auto scale = parameter_at<typename V::U, 1, true>(scale_of(args), single.element, Site::kScale);
  const LoadedBias<V, 1, true> bias{args, single.element};
  char* const to = row_at<V>(args, row, single.element).y;
  store_output<V, 1, true>(to, single.x, scale, bias(0, 0), factor, args);
}

}  // namespace rmsnorm
