// What a thread reads and writes of each tensor: its vectors of a batch, and the single element that it has of its row.
#pragma once

#include "norm.cuh"

namespace rmsnorm {

template <class U, int VEC>
RMSNORM_DEVICE Pack<U, VEC> filled(float value) {
  float values[VEC];
#pragma unroll
  for (int i = 0; i < VEC; ++i) values[i] = value;
  return pack<U, VEC>(values);
}

// A scale or bias.
struct Parameter {
  const char* from;
  bool everywhere;  // it is `value` for each element of a row, and nothing is read
  float value;
};

template <class U>
RMSNORM_DEVICE Parameter parameter_of(const char* from, bool one_element, float absent, Site site) {
  Parameter parameter{from, from == nullptr || one_element, absent};
  if (from != nullptr && one_element) parameter.value = U::up(load_global<U::kBytes>(from, site).word[0]);
  return parameter;
}

struct Parameters {
  Parameter scale;
  Parameter bias;
};

template <class V>
RMSNORM_DEVICE Parameters parameters_of(const KernelArgs& args) {
  using U = typename V::U;
  const Parameter none{nullptr, true, 0.0f};
  return Parameters{parameter_of<U>(args.scale, args.scale_is_one_element != 0, 1.0f, Site::kScale),
                    V::kBias ? parameter_of<U>(args.bias, args.bias_is_one_element != 0, 0.0f, Site::kBias) : none};
}

template <class U, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void load_parameter(Pack<U, VEC> (&out)[N], const Parameter& parameter, int64_t element,
                                   const Place& place, int vectors, Site site) {
  if (!parameter.everywhere) {
    load_vectors<U, VEC, N, ALIGNED>(out, parameter.from + element * U::kBytes, place, vectors, site);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = filled<U, VEC>(parameter.value);
  }
}

// Vectors of a thread that are written at once: as many as are read at once, where parameters are no wider than x.
template <class V>
constexpr int kWriteUnroll = kUnroll * V::T::kBytes / V::U::kBytes;

// What a thread's N vectors are multiplied by, and what is added to them.
template <class V, int VEC, int N>
struct Gains {
  Pack<typename V::U, VEC> scale[N];
  Pack<typename V::U, VEC> bias[V::kBias ? N : 1];
};

// Those of `vectors` vectors from the row's `element` on.
template <class V, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void load_gains(Gains<V, VEC, N>& gains, const Parameters& parameters, int64_t element,
                               const Place& place, int vectors) {
  using U = typename V::U;
  load_parameter<U, VEC, N, ALIGNED>(gains.scale, parameters.scale, element, place, vectors, Site::kScale);
  if constexpr (V::kBias) {
    load_parameter<U, VEC, N, ALIGNED>(gains.bias, parameters.bias, element, place, vectors, Site::kBias);
  }
}

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Grid grid_of(const KernelArgs& args, const Parameters& parameters, int64_t row) {
  const int64_t width = row < args.rows ? args.width : 0;
  if constexpr (ALIGNED) return Grid{width / VEC, 0, 0};
  constexpr int kBytes = V::T::kBytes;
  const int head = head_of<VEC>(args, row);
  int late = late_by<ALIGNED>(args.x + row * args.x_step + head * kBytes);
  if (V::kSkip) late |= late_by<ALIGNED>(args.skip + row * args.skip_step + head * kBytes);
  if (!parameters.scale.everywhere) late |= late_by<ALIGNED>(parameters.scale.from + head * V::U::kBytes);
  if (!parameters.bias.everywhere) late |= late_by<ALIGNED>(parameters.bias.from + head * V::U::kBytes);
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

template <class V, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void store_outputs(char* to, const Pack<typename V::T, VEC> (&x)[N], const Gains<V, VEC, N>& gains,
                                  float factor, const KernelArgs& args, const Place& place, int vectors) {
  constexpr int kBytes = VEC * OutputOf<V>::Type::kBytes;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = place.column0 + i * place.stride;
    if (column >= vectors) continue;
    store_output<V, VEC, ALIGNED>(to + int64_t{column} * kBytes, x[i], gains.scale[i], gains.bias[V::kBias ? i : 0],
                                  factor, args);
  }
}

// A thread's N vectors of x, or of the sum with skip, which is stored.
template <class V, int VEC, int N, bool ALIGNED>
RMSNORM_DEVICE void read_vectors(Pack<typename V::T, VEC> (&x)[N], const RowAt& at, const Place& place, int vectors) {
  using T = typename V::T;
  load_vectors<T, VEC, N, ALIGNED>(x, at.x, place, vectors, Site::kX);
  if constexpr (V::kSkip) {
    Pack<T, VEC> skip[N];
    load_vectors<T, VEC, N, ALIGNED>(skip, at.skip, place, vectors, Site::kSkip);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = summed<T, VEC>(x[i], skip[i]);
    if (at.sum != nullptr) store_vectors<T, VEC, N, ALIGNED>(at.sum, x, place, vectors, Site::kSum);
  }
}

// The element of its row's head or tail that a thread has.
template <class V>
struct Single {
  int64_t element = -1;  // of the row; -1: none
  Pack<typename V::T, 1> x{};
  Pack<typename V::T, 1> skip{};
  Pack<typename V::U, 1> scale{};
  Pack<typename V::U, 1> bias{};
};

template <class U>
RMSNORM_DEVICE Pack<U, 1> parameter_at(const Parameter& parameter, int64_t element, Site site) {
  if (parameter.everywhere) return filled<U, 1>(parameter.value);
  return load_global<U::kBytes>(parameter.from + element * U::kBytes, site);
}

template <class V, int VEC, bool ALIGNED>
RMSNORM_DEVICE Single<V> load_single(const KernelArgs& args, const Parameters& parameters, const Grid& grid,
                                     const Place& place, int64_t row, Site site) {
  using T = typename V::T;
  using U = typename V::U;
  Single<V> single;
  if constexpr (ALIGNED) return single;
  single.element = single_of<VEC>(grid, place, args.width);
  if (single.element < 0) return single;
  const RowAt at = row_at<V>(args, row, single.element);
  single.x = load_global<T::kBytes>(at.x, site);
  if constexpr (V::kSkip) single.skip = load_global<T::kBytes>(at.skip, Site::kSkip);
  single.scale = parameter_at<U>(parameters.scale, single.element, Site::kScale);
  if constexpr (V::kBias) single.bias = parameter_at<U>(parameters.bias, single.element, Site::kBias);
  return single;
}

// Adds its skip, stores the sum, and adds its square to `total`.
template <class V>
RMSNORM_DEVICE float square_single(Single<V>& single, const KernelArgs& args, int64_t row, float total) {
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
RMSNORM_DEVICE void store_single(const Single<V>& single, const KernelArgs& args, int64_t row, float factor) {
  if (single.element < 0) return;
  char* const to = row_at<V>(args, row, single.element).y;
  store_output<V, 1, true>(to, single.x, single.scale, single.bias, factor, args);
}

}  // namespace rmsnorm
