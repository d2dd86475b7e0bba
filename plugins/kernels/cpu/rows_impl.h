// The kernel itself, over a vector type V: included once by each instruction set's file, inside an anonymous namespace
// there, so that no two of them are ever merged by the linker. Uses no library function that could be emitted out of
// line.
//
// V is a vector of float (or double) with kLanes lanes and, for each element type E that a kernel names:
//   V::load(const E*), V::load(const E*, n)    n < kLanes elements; the other lanes are zero, and nothing past n is
//   read v.store(E*), v.store(E*, n), v.stream(E*)  round to E; stream needs a pointer aligned to kLanes * sizeof(E)
//   V::round<E>(v)                             to E and back
//   V::set(s), +, *, V::fma(a, b, c), v.sum(), V::normalise(x, r, inverse)
//
// The includer defines RMSNORM_CPU_FLOAT and RMSNORM_CPU_DOUBLE, and has included rows.h and <math.h>.

// The statistics of this many elements are added up in V's own type before they go to a double, so that the error of a
// sum stays that of a few hundred additions however wide the row is.
constexpr int64_t kSpan = 8192;
constexpr int64_t kUnroll = 4;

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// r of the specification, in double: rounded once, to the stash type, by whoever uses it. A NaN mean stays NaN.
inline double root(const rmsnorm_args& args, double eps, double mean) {
  if (args.eps_mode == RMSNORM_EPS_INSIDE) return __builtin_sqrt(mean + eps);
  const double s = __builtin_sqrt(mean);
  if (args.eps_mode == RMSNORM_EPS_OUTSIDE) return s + eps;
  return s < eps ? eps : s;
}

template <class V, class T, class U, class Y, bool kAfter, bool kSkip, bool kBias, bool kStream>
struct Rows {
  static constexpr int64_t kLanes = V::kLanes;
  static constexpr bool kHalf = sizeof(T) == 2;
  static_assert(kLanes * kUnroll <= kBlock, "a block must cover one step of the loop");

  struct Row {
    const T* x;
    const T* skip;
    Y* y;
    T* sum;
  };

  static V input(const Row& row, int64_t i) {
    const V x = V::load(row.x + i);
    return kSkip ? V::template round<T>(x + V::load(row.skip + i)) : x;
  }

  static V input(const Row& row, int64_t i, int64_t n) {
    const V x = V::load(row.x + i, n);
    return kSkip ? V::template round<T>(x + V::load(row.skip + i, n)) : x;
  }

  // The row's sum of squares. `next` is the row to be read after this one.
  static double squares(const Row& row, int64_t width) {
    double total = 0;
    for (int64_t from = 0; from < width; from += kSpan) {
      const int64_t end = width - from < kSpan ? width : from + kSpan;
      V acc[kUnroll];
      for (int64_t k = 0; k < kUnroll; k++) acc[k] = V::set(0);
      int64_t i = from;
      for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) {
        for (int64_t k = 0; k < kUnroll; k++) {
          const V v = input(row, i + k * kLanes);
          acc[k] = V::fma(v, v, acc[k]);
        }
      }
      for (; i + kLanes <= end; i += kLanes) {
        const V v = input(row, i);
        acc[0] = V::fma(v, v, acc[0]);
      }
      if (i < end) {
        const V v = input(row, i, end - i);
        acc[1] = V::fma(v, v, acc[1]);
      }
      total += ((acc[0] + acc[1]) + (acc[2] + acc[3])).sum();
    }
    return total;
  }

  // Scale and bias with the specification's roundings; the last one is the store's.
  static V finish(V n, V scale, V bias) {
    if (kAfter && kHalf) n = V::template round<T>(n);
    n = n * scale;
    if (!kBias) return n;
    if (kAfter && kHalf && Same<Y, T>::value) n = V::template round<T>(n);
    return n + bias;
  }

  struct Params {
    const U* scale;
    const U* bias;
    int64_t scale_step;
    int64_t bias_step;
    V r;
    V inverse;
  };

  static void part(const Row& row, const Params& p, int64_t i, int64_t n) {
    const V v = input(row, i, n);
    if (kSkip && row.sum) v.store(row.sum + i, n);
    const V bias = kBias ? V::load(p.bias + i * p.bias_step, n) : V::set(0);
    finish(V::normalise(v, p.r, p.inverse), V::load(p.scale + i * p.scale_step, n), bias).store(row.y + i, n);
  }

  template <int64_t kCount>
  static void whole(const Row& row, const Params& p, int64_t i, bool stream_sum) {
    const U* scale = p.scale + i * p.scale_step;
    const U* bias = p.bias + i * p.bias_step;
    for (int64_t k = 0; k < kCount; k++) {
      const V v = input(row, i + k * kLanes);
      if (kSkip && row.sum) {
        if (kStream && stream_sum)
          v.stream(row.sum + i + k * kLanes);
        else
          v.store(row.sum + i + k * kLanes);
      }
      const V b = kBias ? V::load(bias + k * kLanes) : V::set(0);
      const V out = finish(V::normalise(v, p.r, p.inverse), V::load(scale + k * kLanes), b);
      if (kStream)
        out.stream(row.y + i + k * kLanes);
      else
        out.store(row.y + i + k * kLanes);
    }
  }

  // Elements before the first one at which a whole vector may be streamed.
  static int64_t head(const Y* y, int64_t width) {
    if (!kStream) return 0;
    constexpr uintptr_t kAlign = kLanes * sizeof(Y);
    const int64_t skip = static_cast<int64_t>((kAlign - reinterpret_cast<uintptr_t>(y) % kAlign) % kAlign / sizeof(Y));
    return skip < width ? skip : width;
  }

  static void write(const Row& row, const Params& p, const T* next, int64_t width) {
    int64_t i = head(row.y, width);
    if (i > 0) part(row, p, 0, i);
    const bool stream_sum = kStream && reinterpret_cast<uintptr_t>(row.sum + i) % (kLanes * sizeof(T)) == 0;
    for (; i + kUnroll * kLanes <= width; i += kUnroll * kLanes) {
      if (next) {
        for (int64_t k = 0; k < kUnroll * kLanes; k += 64 / static_cast<int64_t>(sizeof(T)))
          __builtin_prefetch(next + i + k);
      }
      whole<kUnroll>(row, p, i, stream_sum);
    }
    for (; i + kLanes <= width; i += kLanes) whole<1>(row, p, i, stream_sum);
    if (i < width) part(row, p, i, width - i);
  }

  static void run(const Call& call, int64_t begin, int64_t end) {
    const rmsnorm_args& args = *call.args;
    const double eps = Same<T, double>::value ? args.eps : static_cast<double>(static_cast<float>(args.eps));
    Params p = {static_cast<const U*>(call.scale),
                static_cast<const U*>(call.bias),
                call.scale_step,
                call.bias_step,
                V::set(0),
                V::set(0)};
    for (int64_t at = begin; at < end; at++) {
      const T* x = static_cast<const T*>(args.x) + at * args.x_stride;
      const Row row = {x, kSkip ? static_cast<const T*>(args.skip) + at * args.skip_stride : nullptr,
                       static_cast<Y*>(args.y) + at * args.y_stride,
                       kSkip && args.sum ? static_cast<T*>(args.sum) + at * args.sum_stride : nullptr};
      const double r = root(args, eps, squares(row, args.width) / static_cast<double>(args.width));
      p.r = V::set_from(r);
      p.inverse = V::set_inverse(r);
      // Whoever does the next row: in the last one of a chunk, too, this is most often the same thread.
      write(row, p, at + 1 < args.rows ? x + args.x_stride : nullptr, args.width);
    }
    if (kStream) V::fence();
  }
};

template <class V, class T, class U, class Y, bool kAfter>
RowsFn choose(const rmsnorm_args& args, bool stream) {
  const int which = (args.skip ? 4 : 0) + (args.bias ? 2 : 0) + (stream ? 1 : 0);
  switch (which) {
    case 0:
      return Rows<V, T, U, Y, kAfter, false, false, false>::run;
    case 1:
      return Rows<V, T, U, Y, kAfter, false, false, true>::run;
    case 2:
      return Rows<V, T, U, Y, kAfter, false, true, false>::run;
    case 3:
      return Rows<V, T, U, Y, kAfter, false, true, true>::run;
    case 4:
      return Rows<V, T, U, Y, kAfter, true, false, false>::run;
    case 5:
      return Rows<V, T, U, Y, kAfter, true, false, true>::run;
    case 6:
      return Rows<V, T, U, Y, kAfter, true, true, false>::run;
    default:
      return Rows<V, T, U, Y, kAfter, true, true, true>::run;
  }
}

template <class V, class T>
RowsFn choose_half(const rmsnorm_args& args, bool stream) {
  const bool after = args.scale_order == RMSNORM_AFTER_CAST;
  const bool wide = (args.scale || args.bias) && args.param_dtype == RMSNORM_F32;
  if (wide) return after ? choose<V, T, float, float, true>(args, stream) : choose<V, T, float, T, false>(args, stream);
  return after ? choose<V, T, T, T, true>(args, stream) : choose<V, T, T, T, false>(args, stream);
}

inline RowsFn choose_rows(const rmsnorm_args& args, bool stream) {
  switch (args.x_dtype) {
    case RMSNORM_F32:
      return choose<RMSNORM_CPU_FLOAT, float, float, float, true>(args, stream);
    case RMSNORM_F16:
      return choose_half<RMSNORM_CPU_FLOAT, f16>(args, stream);
    case RMSNORM_BF16:
      return choose_half<RMSNORM_CPU_FLOAT, bf16>(args, stream);
    default:
      return args.stash == RMSNORM_STASH_F64 ? choose<RMSNORM_CPU_DOUBLE, double, double, double, true>(args, stream)
                                             : nullptr;
  }
}
