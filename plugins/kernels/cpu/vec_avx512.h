// AVX-512 (F, BW, DQ, VL) vectors for rows_impl.h.

// Half types as doubles times a power of two, without a conversion, of which a processor has fewer than of other
// operations: a number's exponent and significand are moved to where a double has them, and the upper bits of the
// exponent are added, which are the same for all of them. Zero and subnormals have another meaning there, and so have
// infinity and NaN.
template <class E>
struct Place;
template <>
struct Place<f16> {
  static constexpr int kLeft = 42;  // for the first of the four in 64 bits
  static constexpr int64_t kBits = 0x7fff;
  static constexpr int64_t kExponent = int64_t{992} << 52;
  static constexpr int16_t kUnit = 0x400;      // of the exponent
  static constexpr int16_t kUnusual = 0x7800;  // zero where the exponent and one unit is no more than that
  static constexpr double kScale = 0x1p-16;    // 992 + 15 - 1023
  static __m256 widen(__m128i h) { return _mm256_cvtph_ps(h); }
};
template <>
struct Place<bf16> {
  static constexpr int kLeft = 45;
  static constexpr int64_t kBits = 0x7fff;
  static constexpr int64_t kExponent = int64_t{768} << 52;
  static constexpr int16_t kUnit = 0x80;
  static constexpr int16_t kUnusual = 0x7f00;
  static constexpr double kScale = 0x1p-128;  // 768 + 127 - 1023
  static __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
};

// The sums of the squares of 32 numbers of kSums: number 4 q + j goes to lane q of sums j.
struct PlacedSums {
  __m512d a = _mm512_setzero_pd(), b = _mm512_setzero_pd(), c = _mm512_setzero_pd(), d = _mm512_setzero_pd();

  void add(__m512d ta, __m512d tb, __m512d tc, __m512d td) {
    a = _mm512_fmadd_pd(ta, ta, a);
    b = _mm512_fmadd_pd(tb, tb, b);
    c = _mm512_fmadd_pd(tc, tc, c);
    d = _mm512_fmadd_pd(td, td, d);
  }
  static double lanes(__m512d eight) {
    const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
  }
  double sum(const PlacedSums& upper) const {
    return (lanes(_mm512_add_pd(a, upper.a)) + lanes(_mm512_add_pd(c, upper.c))) +
           (lanes(_mm512_add_pd(b, upper.b)) + lanes(_mm512_add_pd(d, upper.d)));
  }
};

template <class E>
struct Placed {
  using P = Place<E>;
  static constexpr int kTop = 48 - P::kLeft;

  static __m512d place(__m512i moved) {
    const __m512i bits = _mm512_set1_epi64(P::kBits << P::kLeft);
    return _mm512_castsi512_pd(_mm512_ternarylogic_epi64(moved, bits, _mm512_set1_epi64(P::kExponent), 0xea));
  }
  static unsigned unusual(__m512i h) {
    const __m512i next = _mm512_add_epi16(h, _mm512_set1_epi16(P::kUnit));
    return _mm512_testn_epi16_mask(next, _mm512_set1_epi16(P::kUnusual));
  }
  static void hold(__m512i& a, __m512i& b, __m512i& c, __m512i& d) {
    __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d));
  }
  static void hold(__m512d& a, __m512d& b, __m512d& c, __m512d& d) {
    __asm__ volatile("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d));
  }

  // Numbers of every kind, in the order of the others.
  static void add_any(const E* p, int64_t n, PlacedSums* sums) {
    const __mmask32 mask = n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                        2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
    const __m512i h = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), _mm512_maskz_loadu_epi16(mask, p));
    sums->add(any(_mm512_castsi512_si128(h)), any(_mm512_extracti32x4_epi32(h, 1)),
              any(_mm512_extracti32x4_epi32(h, 2)), any(_mm512_extracti32x4_epi32(h, 3)));
  }
  static __m512d any(__m128i h) { return _mm512_mul_pd(_mm512_cvtps_pd(P::widen(h)), _mm512_set1_pd(P::kScale)); }

  template <class Claim>
  static double sum(const E* p, int64_t n, Claim claim) {
    constexpr int64_t kPatience = 512;  // so many numbers after one that is unusual are taken for unusual
    PlacedSums low, high;
    for (int64_t i = 0; i < n;) {
      for (; i + 64 <= n; i += 64) {
        claim(i);
        __m512i la = _mm512_loadu_si512(p + i);
        __m512i ha = _mm512_loadu_si512(p + i + 32);
        __asm__ volatile("" : "+v"(la), "+v"(ha));
        if (__builtin_expect(unusual(la) | unusual(ha), 0)) break;
        __m512i lb = _mm512_slli_epi64(la, P::kLeft - 16), lc = _mm512_slli_epi64(la, P::kLeft - 32);
        __m512i hb = _mm512_slli_epi64(ha, P::kLeft - 16), hc = _mm512_slli_epi64(ha, P::kLeft - 32);
        __m512i ld = _mm512_srli_epi64(la, kTop), hd = _mm512_srli_epi64(ha, kTop);
        la = _mm512_slli_epi64(la, P::kLeft);
        ha = _mm512_slli_epi64(ha, P::kLeft);
        hold(la, lb, lc, ld);
        hold(ha, hb, hc, hd);
        __m512d pa = place(la), pb = place(lb), pc = place(lc), pd = place(ld);
        __m512d qa = place(ha), qb = place(hb), qc = place(hc), qd = place(hd);
        hold(pa, pb, pc, pd);
        hold(qa, qb, qc, qd);
        low.add(pa, pb, pc, pd);
        high.add(qa, qb, qc, qd);
      }
      for (const int64_t stop = n - i < kPatience ? n : i + kPatience; i < stop; i += 64) {
        add_any(p + i, n - i, &low);
        if (n - i > 32) add_any(p + i + 32, n - i - 32, &high);
      }
    }
    return low.sum(high) * (1 / P::kScale) * (1 / P::kScale);
  }
};

struct Float {
  static constexpr int64_t kLanes = 16;
  static constexpr int64_t kAtOnce = 8;
  static constexpr bool kPlaces = true;
  __m512 v;

  static Float set(float s) { return {_mm512_set1_ps(s)}; }
  static Float set_from(double r) { return set(static_cast<float>(r)); }
  // Rounded once from double, so that x * inverse is as near to the exact quotient as x / float(r) is. The largest
  // finite float stands in for the inverse of a subnormal r, so that zero rows stay zero.
  static Float set_inverse(double r) {
    const double inverse = 1.0 / r;
    return set(r > 0 && inverse > __FLT_MAX__ ? __FLT_MAX__ : static_cast<float>(inverse));
  }
  static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }

  static Float load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Float load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(mask(n), p)}; }
  static Float load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  static Float load(const f16* p, int64_t n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask(n), p))}; }
  static Float widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
  static Float load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Float load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(mask(n), p)); }

  __m256i to(const f16*) const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // Round to nearest even on the bits; a NaN only gets its quiet bit, since the addition could carry it into an
  // infinity.
  __m512i bf16_bits() const {
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x400000));
  }
  __m256i to(const bf16*) const { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_bits(), 16)); }

  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm512_mask_storeu_ps(p, mask(n), v); }
  void stream(float* p) const { _mm512_stream_ps(p, v); }
  template <class E>
  void store(E* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to(p));
  }
  template <class E>
  void store(E* p, int64_t n) const {
    _mm256_mask_storeu_epi16(p, mask(n), to(p));
  }
  template <class E>
  void stream(E* p) const {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), to(p));
  }
  static void fence() { _mm_sfence(); }

  static Float round_as(Float a, const float*) { return a; }
  static Float round_as(Float a, const f16* p) { return {_mm512_cvtph_ps(a.to(p))}; }
  static Float round_as(Float a, const bf16*) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.bf16_bits(), _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  template <class E>
  static Float round(Float a) {
    return round_as(a, static_cast<const E*>(nullptr));
  }

  friend Float operator+(Float a, Float b) { return {_mm512_add_ps(a.v, b.v)}; }
  friend Float operator*(Float a, Float b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static Float fma(Float a, Float b, Float c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Float fms(Float a, Float b, Float c) { return {_mm512_fmsub_ps(a.v, b.v, c.v)}; }
  static Float normalise(Float x, Float, Float inverse) { return x * inverse; }
  double sum() const { return static_cast<double>(_mm512_reduce_add_ps(v)); }

  static void hold(Float& a) { __asm__ volatile("" : "+v"(a.v)); }

  using Doubt = unsigned;
  static bool any(Doubt a) { return a != 0; }
  static __m512i plus(Float a, uint32_t add) {
    return _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(static_cast<int>(add)));
  }
  static Doubt zero_bits(Float a, uint32_t add, uint32_t mask) {
    return _mm512_testn_epi32_mask(plus(a, add), _mm512_set1_epi32(static_cast<int>(mask)));
  }
  static Doubt smaller(Float a, Float b) {
    return _mm512_cmp_ps_mask(_mm512_abs_ps(a.v), _mm512_abs_ps(b.v), _CMP_NGE_UQ);
  }
  static Float cut_bits(Float a, uint32_t add, uint32_t mask) {
    return {_mm512_castsi512_ps(_mm512_and_si512(plus(a, add), _mm512_set1_epi32(static_cast<int>(mask))))};
  }

  struct Squares {
    __m512d sums[4] = {_mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd(), _mm512_setzero_pd()};

    void add(int64_t k, __m512d low, __m512d high) {
      sums[2 * k] = _mm512_fmadd_pd(low, low, sums[2 * k]);
      sums[2 * k + 1] = _mm512_fmadd_pd(high, high, sums[2 * k + 1]);
    }
    void add(int64_t k, Float a) {
      add(k, _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)));
    }
    static __m512d widen(__m128i h, const f16*) { return _mm512_cvtps_pd(_mm256_cvtph_ps(h)); }
    static __m512d widen(__m128i h, const bf16*) {
      return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
    }
    template <class E>
    void add(int64_t k, const E* p) {
      add(k, widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), p),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)), p));
    }
    void add(const Squares& other) {
      for (int k = 0; k < 4; k++) sums[k] = _mm512_add_pd(sums[k], other.sums[k]);
    }
    double sum() const {
      const __m512d eight = _mm512_add_pd(_mm512_add_pd(sums[0], sums[2]), _mm512_add_pd(sums[1], sums[3]));
      const __m256d four = _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
      const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
      return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
  };

  template <class E, class Claim>
  static double squares_of(const E* p, int64_t n, Claim claim) {
    return Placed<E>::sum(p, n, claim);
  }
};

struct Double {
  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kAtOnce = 4;
  __m512d v;

  static Double set(double s) { return {_mm512_set1_pd(s)}; }
  static Double set_from(double r) { return set(r); }
  static Double set_inverse(double r) { return set(r); }
  static __mmask8 mask(int64_t n) { return static_cast<__mmask8>((1u << n) - 1u); }
  static Double load(const double* p) { return {_mm512_loadu_pd(p)}; }
  static Double load(const double* p, int64_t n) { return {_mm512_maskz_loadu_pd(mask(n), p)}; }
  void store(double* p) const { _mm512_storeu_pd(p, v); }
  void store(double* p, int64_t n) const { _mm512_mask_storeu_pd(p, mask(n), v); }
  void stream(double* p) const { _mm512_stream_pd(p, v); }
  static void fence() { _mm_sfence(); }
  template <class E>
  static Double round(Double a) {
    return a;
  }
  friend Double operator+(Double a, Double b) { return {_mm512_add_pd(a.v, b.v)}; }
  friend Double operator*(Double a, Double b) { return {_mm512_mul_pd(a.v, b.v)}; }
  static Double fma(Double a, Double b, Double c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
  static Double normalise(Double x, Double r, Double) { return {_mm512_div_pd(x.v, r.v)}; }
  double sum() const { return _mm512_reduce_add_pd(v); }
};
