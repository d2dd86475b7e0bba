// How rows_impl.h rounds to half types once, as if all arithmetic before had been exact. Included by it.
//
// The sum of squares and 1 / r are doubles. An element is first computed in float, with an error of at most some units
// in the last place. Only where a number half-way between two of the half type is that near may its rounding be wrong:
// there it is computed again in double, and brought to the half type by way of a float rounded to odd.

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// Squares are added up in this many sums, the same ones in every instruction set, so that all compute the same
// statistics.
constexpr int64_t kSums = 64;

// Floats times kScale have the half type's last place at bit kBits, whatever their exponent: 2^-112 takes the subnormal
// float16 to subnormal floats. kBack undoes it.
template <class T>
struct Grid;
template <>
struct Grid<f16> {
  static constexpr float kScale = 0x1p-112f;
  static constexpr float kBack = 0x1p112f;
  static constexpr uint32_t kPlace = 1u << 13;
};
template <>
struct Grid<bf16> {
  static constexpr float kScale = 1;
  static constexpr float kBack = 1;
  static constexpr uint32_t kPlace = 1u << 16;
};

// Whether a number half-way between two of T is within kWindow / 2 - 1 units in the last place of a float on T's grid.
template <class T, uint32_t kWindow, class V>
inline typename V::Doubt near_tie(V on_grid) {
  constexpr uint32_t kPlace = Grid<T>::kPlace;
  return V::zero_bits(on_grid, kPlace / 2 + kWindow / 2, (kPlace - 1) & ~(kWindow - 1));
}

// A float on T's grid rounded to T, where near_tie has no. The addition is that of near_tie, which makes no difference
// elsewhere.
template <class T, uint32_t kWindow, class V>
inline V cut(V on_grid) {
  constexpr uint32_t kPlace = Grid<T>::kPlace;
  return V::cut_bits(on_grid, kPlace / 2 + kWindow / 2, ~(kPlace - 1));
}

// A double as a float whose last bit says whether anything was cut off ("round to odd"): rounding that to a type two or
// more bits shorter gives what rounding the double itself would.
inline float to_odd(double d) {
  const float f = static_cast<float>(d);
  const double back = static_cast<double>(f);
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  const bool away = __builtin_fabs(back) > __builtin_fabs(d);
  const uint32_t odd = away ? bits - 1u : bits + 1u;
  bits = (back < d || back > d) && (bits & 1u) == 0 ? odd : bits;
  float out;
  __builtin_memcpy(&out, &bits, sizeof out);
  return out;
}
