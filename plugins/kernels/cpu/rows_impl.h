// The kernel itself, over a vector type V: included once by each instruction set's file, inside an anonymous namespace
// there, so that no two of them are ever merged by the linker. Uses no library function that could be emitted out of
// line.
//
// V is a vector of float (or double) with kLanes lanes and, for each element type E that a kernel names:
//   V::load(const E*), V::load(const E*, n)    n < kLanes elements; the other lanes are zero, and nothing past n is
//   read v.store(E*), v.store(E*, n), v.stream(E*)  round to E; stream needs a pointer aligned to kLanes * sizeof(E)
//   V::round<E>(v)                             to E and back
//   V::set(s), +, *, V::fma(a, b, c), v.sum(), V::normalise(x, r, inverse)
// and, for vectors of float only:
//   V::Squares                                 kSums / 2 doubles: add(k, v) adds the squares of v's lanes to those from
//                                              k * kLanes on, add(k, const E*) those of whole vectors in memory;
//                                              add(squares) adds others; sum() adds the upper half to the lower, and so
//                                              on
//   V::kPlaces, V::squares_of(p, n, claim)     whether it has the sum of the squares of n elements of a half type,
//                                              which is what Squares gives; calls claim(i) for every whole kSums of
//                                              them
//   V::kAtOnce                                 how many vectors of half types to compute together
//   V::hold(v)                                 nothing, but compilers compute v here
//   V::fms(a, b, c)                            a * b - c, rounded once, except where zero_bits always says yes
//   V::Doubt, a | b, V::any(doubt)             a yes or no for each lane
//   V::smaller(a, b)                           yes where not |a| >= |b|, so for NaN too
//   V::zero_bits(v, add, mask)                 yes where (bits + add) & mask is 0
//   V::cut_bits(v, add, mask)                  the float with the bits (bits + add) & mask
//
// The includer defines RMSNORM_CPU_FLOAT and RMSNORM_CPU_DOUBLE, and has included rows.h.

#include "exact_impl.h"

constexpr int64_t kUnroll = 4;
// Parameters of half types are widened to floats on the stack, for so many columns at a time.
constexpr int64_t kTile = 4096;

// r of the specification, in double: rounded once, to the stash type, by whoever uses it. A NaN mean stays NaN.
inline double root(const rmsnorm_args& args, double eps, double mean) {
  if (args.eps_mode == RMSNORM_EPS_INSIDE) return __builtin_sqrt(mean + eps);
  const double s = __builtin_sqrt(mean);
  if (args.eps_mode == RMSNORM_EPS_OUTSIDE) return s + eps;
  return s < eps ? eps : s;
}

// Where a row and what belongs to it begin.
template <class T, class Y>
struct RowOf {
  const T* x;
  const T* skip;
  Y* y;
  T* sum;
  const T* next;  // the x of the row to be read after this one, or nullptr
};

template <class V, class T, bool kSkip>
struct Input {
  template <class Y>
  static V load(const RowOf<T, Y>& row, int64_t i) {
    const V x = V::load(row.x + i);
    return kSkip ? V::template round<T>(x + V::load(row.skip + i)) : x;
  }

  template <class Y>
  static V load(const RowOf<T, Y>& row, int64_t i, int64_t n) {
    const V x = V::load(row.x + i, n);
    return kSkip ? V::template round<T>(x + V::load(row.skip + i, n)) : x;
  }
};

// Scale and bias for some columns, of type P in memory.
template <class P>
struct Params {
  const P* scale;
  const P* bias;
  int64_t scale_step;
  int64_t bias_step;
};

// ---- what becomes of an element: arithmetic in x's own type ...

template <class V, class T, class U, class Y, bool kAfter, bool kBias, bool kHalf = sizeof(T) == 2>
struct Formula {
  using Param = T;  // in memory, when an element is computed

  V r;
  V inverse;

  void set(double root, int64_t) {
    r = V::set_from(root);
    inverse = V::set_inverse(root);
  }

  V operator()(V x, V scale, V bias) const {
    const V product = V::normalise(x, r, inverse) * scale;
    return kBias ? product + bias : product;
  }
};

// ... and as if it were exact, for half types.
template <class V, class T, class U, class Y, bool kAfter, bool kBias>
struct Formula<V, T, U, Y, kAfter, kBias, true> {
  using Param = float;
  using Doubt = typename V::Doubt;
  static constexpr bool kHalfScale = Same<U, f16>::value;
  // What the normalized value lacks to leave T's grid again. No float16 is too large for it.
  static constexpr float kParamScale = kAfter && kHalfScale ? Grid<T>::kBack : 1;
  // 1 / r is off by up to an ulp, and so is each product but the last, which is off by half of one. The product of two
  // float16 is exact. With a bias before the cast, three halves at most.
  static constexpr uint32_t kWindow = kAfter || (kHalfScale && !kBias) ? 4 : 8;
  // A bias that leaves less than this of the product leaves too little of it.
  static constexpr float kLeastLeft = 0x1p-12f;

  double inverse;
  V factor;
  V factor_rest;  // 1 / r without factor
  bool always;

  void set(double root, int64_t width) {
    inverse = 1.0 / root;
    const float near = static_cast<float>(inverse);
    factor = V::set(near * (kAfter ? Grid<T>::kScale : 1.0f));
    factor_rest = V::set(static_cast<float>(inverse - static_cast<double>(near)));
    // Where floats are too coarse for 1 / r, or x / r too large for T.
    const double least = Grid<T>::kScale == 1 ? 0x1p-100 : 0x1p-13;
    const bool usual = inverse > least && inverse < 0x1p100 && width < (int64_t{1} << 31);
    always = !usual;
  }

  // kCount vectors, each right where its doubt has no. One operation for all of them after the other, not one vector
  // after the other: a processor's queues hold a few dozen operations, and these wait for nothing.
  template <int64_t kCount>
  __attribute__((always_inline)) void near(const V* x, const float* scale, const float* bias, V* y,
                                           typename V::Doubt* doubt) const {
    constexpr int64_t kLanes = V::kLanes;
    if constexpr (kAfter) {
      for (int64_t k = 0; k < kCount; k++) y[k] = x[k] * factor;
      hold<kCount>(y);
      for (int64_t k = 0; k < kCount; k++) doubt[k] = near_tie<T, kWindow>(y[k]);
      for (int64_t k = 0; k < kCount; k++) y[k] = cut<T, kWindow>(y[k]);
      hold<kCount>(y);
      for (int64_t k = 0; k < kCount; k++)
        y[k] = affine(y[k], V::load(scale + k * kLanes), kBias ? V::load(bias + k * kLanes) : V::set(0));
    } else if constexpr (kBias) {
      for (int64_t k = 0; k < kCount; k++)
        y[k] = biased(x[k], V::load(scale + k * kLanes), V::load(bias + k * kLanes), &doubt[k]);
    } else {
      // The product of two bfloat16, taken first, might leave float's range.
      for (int64_t k = 0; k < kCount; k++) y[k] = x[k] * (kHalfScale ? V::load(scale + k * kLanes) : factor);
      hold<kCount>(y);
      for (int64_t k = 0; k < kCount; k++) y[k] = y[k] * (kHalfScale ? factor : V::load(scale + k * kLanes));
      hold<kCount>(y);
      for (int64_t k = 0; k < kCount; k++) doubt[k] = near_tie<T, kWindow>(on_grid(y[k]));
    }
  }

  // Keeps compilers from bringing one vector to its end before the next.
  template <int64_t kCount>
  __attribute__((always_inline)) static void hold(V* v) {
    for (int64_t k = 0; k < kCount; k++) V::hold(v[k]);
  }

  static V on_grid(V y) { return Grid<T>::kScale == 1 ? y : y * V::set(Grid<T>::kScale); }

  // In two floats, since a bias may leave nothing of the product but its error.
  V biased(V x, V scale, V bias, typename V::Doubt* doubt) const {
    const V n = x * factor;
    const V n_rest = V::fma(x, factor_rest, V::fms(x, factor, n));
    const V product = n * scale;
    const V rest = V::fma(n_rest, scale, V::fms(n, scale, product));
    const V y = (product + bias) + rest;
    *doubt = near_tie<T, kWindow>(on_grid(y)) | V::smaller(y, product * V::set(kLeastLeft));
    return y;
  }

  // From the normalized value, rounded to T and still on T's grid. The product is exact.
  static V affine(V n, V scale, V bias) {
    if (kParamScale == 1 && Grid<T>::kBack != 1) n = n * V::set(Grid<T>::kBack);
    n = n * scale;
    if (!kBias) return n;
    if (Same<Y, T>::value) n = V::template round<T>(n);
    return n + bias;
  }

  // Always right, by way of double.
  __attribute__((noinline)) V exact(V x, V scale, V bias) const {
    constexpr int64_t kLanes = V::kLanes;
    float out[kLanes], s[kLanes], b[kLanes];
    x.store(out);
    scale.store(s);
    bias.store(b);
    for (int64_t j = 0; j < kLanes; j++) {
      const double v = static_cast<double>(out[j]);
      const double d = kAfter ? v * inverse : v * static_cast<double>(s[j]) * inverse;
      out[j] = to_odd(kAfter || !kBias ? d : d + static_cast<double>(b[j]));
    }
    const V y = V::load(out);
    return kAfter ? affine(V::template round<T>(y) * V::set(Grid<T>::kScale), scale, bias) : y;
  }
};

// ---- rows

// Takes rows from a deal, an eighth of what a part has left at a time: large pieces at first, small ones at the end,
// when threads wait for the last of them.
struct Taker {
  Deal* deal;
  int64_t part;
  int64_t parts_left;
  int64_t worth;  // a part with fewer rows left is left alone
  int64_t row;    // the one to do now, and the end of those taken
  int64_t end;

  Taker(Deal& of, int64_t first) : deal(&of), part(first), parts_left(of.parts), worth(1), row(-1), end(0) {}

  // Goes on to another row, if there is one.
  bool next() { return ++row < end || take(); }

  bool take() {
    for (; parts_left > 0; parts_left--, part = part + 1 < deal->parts ? part + 1 : 0, worth = deal->worth) {
      Part& from = deal->part[part];
      row = __atomic_load_n(&from.next, __ATOMIC_RELAXED);
      while (from.end - row >= worth) {
        const int64_t left = from.end - row;
        const int64_t some = left / 8 > deal->least ? left / 8 : deal->least;
        end = some < left ? row + some : from.end;
        if (__atomic_compare_exchange_n(&from.next, &row, end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
      }
    }
    return false;
  }
};

template <class V, class T, class U, class Y, bool kAfter, bool kSkip, bool kBias, bool kStream>
struct Rows {
  static constexpr int64_t kLanes = V::kLanes;
  static constexpr bool kHalf = sizeof(T) == 2;
  // With a bias each vector needs more registers.
  static constexpr int64_t kAtOnce = kHalf && !kBias ? V::kAtOnce : kUnroll;
  static_assert(kLanes * kUnroll <= kBlock && kLanes * kAtOnce <= kBlock, "a block must cover one step of the loop");

  using Row = RowOf<T, Y>;
  using In = Input<V, T, kSkip>;
  using F = Formula<V, T, U, Y, kAfter, kBias>;
  using Param = typename F::Param;

  // The sums with skip of half types are stored along with the squares, and only read again afterwards: they take a
  // rounding.
  static constexpr bool kStoresSumFirst = kHalf && kSkip;

  // The sum of squares of some columns, which begin at a multiple of kSpan.
  static double squares(const Row& row, int64_t from, int64_t end) {
    double total = 0;
    for (; from < end; from += kSpan) {
      const int64_t to = end - from < kSpan ? end : from + kSpan;
      if constexpr (kHalf)
        total += exact_squares(row, from, to);
      else
        total += near_squares(row, from, to);
    }
    return total;
  }

  static constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));

  // Asks for what is needed later while the squares of half types at columns i .. i + kCount - 1 are added up: for the
  // lines that will be written, since a store reads its line first; where it does not, for every other line of the next
  // row.
  template <int64_t kCount>
  static void claim(const Row& row, int64_t i) {
    if (!kStream) {
      for (int64_t k = 0; k < kCount; k += 64 / static_cast<int64_t>(sizeof(Y))) __builtin_prefetch(row.y + i + k, 1);
    } else if (row.next) {
      for (int64_t k = 0; k < kCount; k += 2 * kLine) __builtin_prefetch(row.next + i + k);
    }
  }

  // Asks for the lines of the next row while columns i .. i + kCount - 1 are written.
  template <int64_t kCount>
  static void prefetch(const Row& row, int64_t i) {
    constexpr bool kOthers = kHalf && kStream;
    if (!row.next) return;
    for (int64_t k = kOthers ? kLine : 0; k < kCount; k += kOthers ? 2 * kLine : kLine)
      __builtin_prefetch(row.next + i + k);
  }

  static double near_squares(const Row& row, int64_t i, int64_t end) {
    V acc[kUnroll];
    for (int64_t k = 0; k < kUnroll; k++) acc[k] = V::set(0);
    for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) {
      for (int64_t k = 0; k < kUnroll; k++) {
        const V v = In::load(row, i + k * kLanes);
        acc[k] = V::fma(v, v, acc[k]);
      }
    }
    for (; i + kLanes <= end; i += kLanes) {
      const V v = In::load(row, i);
      acc[0] = V::fma(v, v, acc[0]);
    }
    if (i < end) {
      const V v = In::load(row, i, end - i);
      acc[1] = V::fma(v, v, acc[1]);
    }
    return ((acc[0] + acc[1]) + (acc[2] + acc[3])).sum();
  }

  // Squares of half types are exact in double, and their sums nearly so.
  static double exact_squares(const Row& row, int64_t i, int64_t end) {
    if constexpr (!kSkip && V::kPlaces) {
      return V::squares_of(row.x + i, end - i, [&row, i](int64_t at) { claim<kSums>(row, i + at); });
    } else {
      auto sums = half_the_sums(row, i, end);
      sums.add(half_the_sums(row, i + kSums / 2, end));
      return sums.sum();
    }
  }

  // Those of every other kSums / 2 elements from i on: all sums at once would be more than there are registers.
  static auto half_the_sums(const Row& row, int64_t i, int64_t end) {
    constexpr int64_t kStep = kSums / 2;
    typename V::Squares sums;
    for (; i + kStep <= end; i += kSums) {
      claim<kStep>(row, i);
      for (int64_t k = 0; k < kStep / kLanes; k++) {
        if constexpr (kSkip)
          sums.add(k, summed(row, i + k * kLanes));
        else
          sums.add(k, row.x + i + k * kLanes);
      }
    }
    for (int64_t k = 0; i < end && k < kStep / kLanes; k++, i += kLanes)
      sums.add(k, i + kLanes <= end ? summed(row, i) : summed(row, i, end - i));
    return sums;
  }

  static V summed(const Row& row, int64_t i) {
    const V v = In::load(row, i);
    if (kSkip && row.sum) v.store(row.sum + i);
    return v;
  }

  static V summed(const Row& row, int64_t i, int64_t n) {
    const V v = In::load(row, i, n);
    if (kSkip && row.sum) v.store(row.sum + i, n);
    return v;
  }

  static void part(const Row& row, const F& formula, const Params<Param>& p, int64_t i, int64_t n) {
    const V x = In::load(row, i, n);
    const V scale = V::load(p.scale + i * p.scale_step, n);
    const V bias = kBias ? V::load(p.bias + i * p.bias_step, n) : V::set(0);
    V y;
    if constexpr (kHalf) {
      // Whole vectors on the stack, for near().
      float scales[kLanes], biases[kLanes];
      scale.store(scales);
      bias.store(biases);
      typename F::Doubt doubt;
      formula.template near<1>(&x, scales, biases, &y, &doubt);
      if (formula.always || V::any(doubt)) y = formula.exact(x, scale, bias);
    } else {
      y = formula(x, scale, bias);
    }
    if (kSkip && row.sum) x.store(row.sum + i, n);
    y.store(row.y + i, n);
  }

  static void put(const Row& row, int64_t i, V x, V y, bool stream_sum) {
    if (kSkip && row.sum) {
      if (kStream && stream_sum)
        x.stream(row.sum + i);
      else
        x.store(row.sum + i);
    }
    if (kStream)
      y.stream(row.y + i);
    else
      y.store(row.y + i);
  }

  // What near() computes of whole vectors, with what it doubts computed again. The formula is a copy, since what is on
  // nobody else's stack need not be read again after a store.
  template <int64_t kCount>
  __attribute__((noinline)) static void settle(const Row& row, F formula, const Params<Param>& p, int64_t i, V* y) {
    for (int64_t end = i + kCount * kLanes; i < end; i += kLanes, y++) {
      const V x = In::load(row, i);
      const Param* scale = p.scale + i * p.scale_step;
      const Param* bias = p.bias + i * p.bias_step;
      typename F::Doubt doubt;
      formula.template near<1>(&x, scale, bias, y, &doubt);
      if (formula.always || V::any(doubt)) *y = formula.exact(x, V::load(scale), kBias ? V::load(bias) : V::set(0));
    }
  }

  template <int64_t kCount>
  __attribute__((always_inline)) static void whole(const Row& row, const F& formula, const Params<Param>& p, int64_t i,
                                                   bool stream_sum) {
    const Param* scale = p.scale + i * p.scale_step;
    const Param* bias = p.bias + i * p.bias_step;
    if constexpr (kHalf) {
      V x[kCount], y[kCount];
      typename F::Doubt doubt[kCount];
      for (int64_t k = 0; k < kCount; k++) x[k] = In::load(row, i + k * kLanes);
      F::template hold<kCount>(x);
      formula.template near<kCount>(x, scale, bias, y, doubt);
      auto all = doubt[0];
      for (int64_t k = 1; k < kCount; k++) all = all | doubt[k];
      if (__builtin_expect(formula.always || V::any(all), 0)) {
        // On the stack only here: elsewhere vectors stay in registers.
        V settled[kCount];
        settle<kCount>(row, formula, p, i, settled);
        for (int64_t k = 0; k < kCount; k++) y[k] = settled[k];
      }
      // Only now, since y may be x. A sum has been stored before.
      for (int64_t k = 0; k < kCount; k++) {
        if (kStream)
          y[k].stream(row.y + i + k * kLanes);
        else
          y[k].store(row.y + i + k * kLanes);
      }
    } else {
      for (int64_t k = 0; k < kCount; k++) {
        const V x = In::load(row, i + k * kLanes);
        const V b = kBias ? V::load(bias + k * kLanes) : V::set(0);
        put(row, i + k * kLanes, x, formula(x, V::load(scale + k * kLanes), b), stream_sum);
      }
    }
  }

  // Elements before the first one at which a whole vector may be streamed.
  static int64_t head(const Y* y, int64_t width) {
    if (!kStream) return 0;
    constexpr uintptr_t kAlign = kLanes * sizeof(Y);
    const int64_t skip = static_cast<int64_t>((kAlign - reinterpret_cast<uintptr_t>(y) % kAlign) % kAlign / sizeof(Y));
    return skip < width ? skip : width;
  }

  // Inline, so that what a store might change, for all that a compiler knows, is on nobody else's stack.
  __attribute__((always_inline)) static void write(const Row& row, const F& formula, const Params<Param>& p,
                                                   int64_t width) {
    if constexpr (kStoresSumFirst) {
      if (row.sum) {
        const Row summed = {row.sum, nullptr, row.y, nullptr, row.next};
        return Rows<V, T, U, Y, kAfter, false, kBias, kStream>::write(summed, formula, p, width);
      }
    }
    int64_t i = head(row.y, width);
    if (i > 0) part(row, formula, p, 0, i);
    const bool stream_sum = kStream && reinterpret_cast<uintptr_t>(row.sum + i) % (kLanes * sizeof(T)) == 0;
    for (; i + kAtOnce * kLanes <= width; i += kAtOnce * kLanes) {
      prefetch<kAtOnce * kLanes>(row, i);
      whole<kAtOnce>(row, formula, p, i, stream_sum);
    }
    for (; i + kLanes <= width; i += kLanes) whole<1>(row, formula, p, i, stream_sum);
    if (i < width) part(row, formula, p, i, width - i);
  }

  static constexpr bool kWiden = !Same<U, Param>::value;

  // Where widened parameters are.
  struct Space {
    alignas(64) Param scale[kWiden ? kTile : 1];
    alignas(64) Param bias[kWiden && kBias ? kTile : 1];
  };

  static void widen(const U* from, int64_t count, float by, Param* to) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) (V::load(from + i) * V::set(by)).store(to + i);
    if (i < count) (V::load(from + i, count - i) * V::set(by)).store(to + i, count - i);
  }

  // The parameters of columns from .. from + count - 1; at most kTile where they are widened.
  static Params<Param> params_at(const Call& call, int64_t from, int64_t count, Space* space) {
    const U* scale = static_cast<const U*>(call.scale) + from * call.scale_step;
    const U* bias = kBias ? static_cast<const U*>(call.bias) + from * call.bias_step : nullptr;
    if constexpr (kWiden) {
      widen(scale, call.scale_step ? count : kBlock, F::kParamScale, space->scale);
      if (kBias) widen(bias, call.bias_step ? count : kBlock, 1, space->bias);
      return {space->scale, space->bias, call.scale_step, call.bias_step};
    } else {
      return {scale, bias, call.scale_step, call.bias_step};
    }
  }

  static Row row_at(const Call& call, int64_t at) {
    const rmsnorm_args& args = *call.args;
    const T* x = static_cast<const T*>(args.x) + at * args.x_stride;
    // Whoever does the next row: after the last one that a thread has taken, too, this is most often the same.
    return {x, kSkip ? static_cast<const T*>(args.skip) + at * args.skip_stride : nullptr,
            static_cast<Y*>(args.y) + at * args.y_stride,
            kSkip && args.sum ? static_cast<T*>(args.sum) + at * args.sum_stride : nullptr,
            at + 1 < args.rows ? x + args.x_stride : nullptr};
  }

  static Row advanced(const Row& row, int64_t by) {
    return {row.x + by, kSkip ? row.skip + by : nullptr, row.y + by, kSkip && row.sum ? row.sum + by : nullptr,
            row.next ? row.next + by : nullptr};
  }

  static F formula_for(const Call& call, double total) {
    const rmsnorm_args& args = *call.args;
    const double eps = Same<T, double>::value ? args.eps : static_cast<double>(static_cast<float>(args.eps));
    F formula;
    formula.set(root(args, eps, total / static_cast<double>(args.width)), args.width);
    return formula;
  }

  static void run(const Call& call, Deal& deal, int64_t part) {
    const int64_t width = call.args->width;
    Taker taker(deal, part);
    if (!taker.next()) return;
    if (kWiden && width > kTile) {
      do {
        const Row row = row_at(call, taker.row);
        write_tiles(call, row, formula_for(call, squares(row, 0, width)), 0, width);
      } while (taker.next());
    } else {
      Space space;
      const Params<Param> params = params_at(call, 0, width, &space);
      do {
        const Row row = row_at(call, taker.row);
        write(row, formula_for(call, squares(row, 0, width)), params, width);
      } while (taker.next());
    }
    if (kStream) V::fence();
  }

  static void write_tiles(const Call& call, const Row& row, const F& formula, int64_t from, int64_t end) {
    Space space;
    for (int64_t next = from; from < end; from = next) {
      next = !kWiden || end - from < kTile ? end : from + kTile;
      write(advanced(row, from), formula, params_at(call, from, next - from, &space), next - from);
    }
  }

  // The two halves of the work on some columns of one row, for several threads.
  static double squares_of(const Call& call, int64_t at, int64_t from, int64_t end) {
    return squares(row_at(call, at), from, end);
  }

  static void write_columns(const Call& call, int64_t at, double total, int64_t from, int64_t end) {
    write_tiles(call, row_at(call, at), formula_for(call, total), from, end);
    if (kStream) V::fence();
  }
};

template <class V, class T, class U, class Y, bool kAfter, bool kSkip, bool kBias, bool kStream>
constexpr Functions functions_of() {
  using R = Rows<V, T, U, Y, kAfter, kSkip, kBias, kStream>;
  return {R::run, R::squares_of, R::write_columns};
}

template <class V, class T, class U, class Y, bool kAfter, bool kStream>
Functions choose(const rmsnorm_args& args) {
  if (args.skip) {
    return args.bias ? functions_of<V, T, U, Y, kAfter, true, true, kStream>()
                     : functions_of<V, T, U, Y, kAfter, true, false, kStream>();
  }
  return args.bias ? functions_of<V, T, U, Y, kAfter, false, true, kStream>()
                   : functions_of<V, T, U, Y, kAfter, false, false, kStream>();
}

template <class V, class T>
Functions choose_full(const rmsnorm_args& args, bool stream) {
  return stream ? choose<V, T, T, T, true, true>(args) : choose<V, T, T, T, true, false>(args);
}

template <class V, class T, class U, class Y, bool kAfter>
Functions choose_half_as(const rmsnorm_args& args, bool stream) {
  return stream ? choose<V, T, U, Y, kAfter, true>(args) : choose<V, T, U, Y, kAfter, false>(args);
}

template <class V, class T>
Functions choose_half(const rmsnorm_args& args, bool stream) {
  const bool after = args.scale_order == RMSNORM_AFTER_CAST;
  const bool wide = (args.scale || args.bias) && args.param_dtype == RMSNORM_F32;
  if (wide)
    return after ? choose_half_as<V, T, float, float, true>(args, stream)
                 : choose_half_as<V, T, float, T, false>(args, stream);
  return after ? choose_half_as<V, T, T, T, true>(args, stream) : choose_half_as<V, T, T, T, false>(args, stream);
}

inline Functions choose_rows(const rmsnorm_args& args, bool stream) {
  switch (args.x_dtype) {
    case RMSNORM_F32:
      return choose_full<RMSNORM_CPU_FLOAT, float>(args, stream);
    case RMSNORM_F16:
      return choose_half<RMSNORM_CPU_FLOAT, f16>(args, stream);
    case RMSNORM_BF16:
      return choose_half<RMSNORM_CPU_FLOAT, bf16>(args, stream);
    default:
      if (args.stash != RMSNORM_STASH_F64) return {nullptr, nullptr, nullptr};
      return choose_full<RMSNORM_CPU_DOUBLE, double>(args, stream);
  }
}
