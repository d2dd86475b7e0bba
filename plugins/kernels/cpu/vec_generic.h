// Plain C++ "vectors" for rows_impl.h: short arrays that a compiler may vectorise as it likes.

inline float from_bits(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, sizeof f);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, sizeof u);
  return u;
}

inline float widen(float a) { return a; }
inline double widen(double a) { return a; }
inline float widen(bf16 a) { return from_bits(static_cast<uint32_t>(a.bits) << 16); }
inline float widen(f16 a) {
  const uint32_t sign = static_cast<uint32_t>(a.bits & 0x8000u) << 16;
  const uint32_t magnitude = a.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  // 2^112 moves the exponent's bias from 15 to 127, for subnormals too.
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));
}

inline void narrow(float f, float* out) { *out = f; }
inline void narrow(double f, double* out) { *out = f; }
inline void narrow(float f, bf16* out) {
  const uint32_t u = to_bits(f);
  const uint32_t rounded = f != f ? u | 0x400000u : u + 0x7fffu + (u >> 16 & 1u);
  out->bits = static_cast<uint16_t>(rounded >> 16);
}
inline void narrow(float f, f16* out) {
  const uint32_t u = to_bits(f);
  const uint32_t sign = u >> 16 & 0x8000u;
  const uint32_t magnitude = u & 0x7fffffffu;
  uint32_t h;
  if (magnitude > 0x7f800000u) {
    h = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, from where 65504 is no longer the nearest
    h = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded subnormal in the low bits
    h = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    h = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out->bits = static_cast<uint16_t>(sign | h);
}

template <class S, int kN>
struct Plain {
  static constexpr int64_t kLanes = kN;
  static constexpr int64_t kAtOnce = 4;
  static constexpr bool kPlaces = false;
  S v[kN];

  static Plain set(S s) {
    Plain a;
    for (int i = 0; i < kN; i++) a.v[i] = s;
    return a;
  }
  static Plain set_from(double r) { return set(static_cast<S>(r)); }
  // See vec_avx512.h.
  static Plain set_inverse(double r) {
    const double inverse = 1.0 / r;
    return set(r > 0 && inverse > __FLT_MAX__ ? static_cast<S>(__FLT_MAX__) : static_cast<S>(inverse));
  }
  template <class E>
  static Plain load(const E* p) {
    Plain a;
    for (int i = 0; i < kN; i++) a.v[i] = widen(p[i]);
    return a;
  }
  template <class E>
  static Plain load(const E* p, int64_t n) {
    Plain a = set(0);
    for (int64_t i = 0; i < n; i++) a.v[i] = widen(p[i]);
    return a;
  }
  template <class E>
  void store(E* p) const {
    for (int i = 0; i < kN; i++) narrow(v[i], p + i);
  }
  template <class E>
  void store(E* p, int64_t n) const {
    for (int64_t i = 0; i < n; i++) narrow(v[i], p + i);
  }
  template <class E>
  void stream(E* p) const {
    store(p);
  }
  static void fence() {}
  template <class E>
  static Plain round(Plain a) {
    for (int i = 0; i < kN; i++) {
      E e;
      narrow(a.v[i], &e);
      a.v[i] = widen(e);
    }
    return a;
  }
  friend Plain operator+(Plain a, Plain b) {
    for (int i = 0; i < kN; i++) a.v[i] += b.v[i];
    return a;
  }
  friend Plain operator*(Plain a, Plain b) {
    for (int i = 0; i < kN; i++) a.v[i] *= b.v[i];
    return a;
  }
  static Plain fma(Plain a, Plain b, Plain c) {
    for (int i = 0; i < kN; i++) c.v[i] += a.v[i] * b.v[i];
    return c;
  }
  static Plain fms(Plain a, Plain b, Plain c) {
    for (int i = 0; i < kN; i++) c.v[i] = a.v[i] * b.v[i] - c.v[i];
    return c;
  }
  static Plain normalise(Plain x, Plain r, Plain inverse) {
    if (sizeof(S) == sizeof(float)) return x * inverse;
    for (int i = 0; i < kN; i++) x.v[i] /= r.v[i];
    return x;
  }
  double sum() const {
    S s[kN];
    for (int i = 0; i < kN; i++) s[i] = v[i];
    for (int half = kN / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; i++) s[i] += s[i + half];
    }
    return static_cast<double>(s[0]);
  }

  static void hold(Plain&) {}

  // Plain code has nothing faster than the way that is always right.
  using Doubt = unsigned;
  static bool any(Doubt a) { return a != 0; }
  static Doubt zero_bits(Plain, uint32_t, uint32_t) { return 1; }
  static Doubt smaller(Plain, Plain) { return 1; }
  static Plain cut_bits(Plain a, uint32_t, uint32_t) { return a; }

  struct Squares {
    double sums[32] = {};

    void add(int64_t k, Plain a) {
      for (int i = 0; i < kN; i++) {
        const double wide = static_cast<double>(a.v[i]);
        sums[k * kN + i] += wide * wide;
      }
    }
    template <class E>
    void add(int64_t k, const E* p) {
      add(k, load(p));
    }
    void add(const Squares& other) {
      for (int i = 0; i < 32; i++) sums[i] += other.sums[i];
    }
    double sum() const {
      double s[16];
      for (int i = 0; i < 16; i++) s[i] = sums[i] + sums[i + 16];
      for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) s[i] += s[i + half];
      }
      return s[0];
    }
  };
};

using Float = Plain<float, 8>;
using Double = Plain<double, 4>;
