// AVX2, FMA and F16C vectors for rows_impl.h.

struct Float {
  static constexpr int64_t kLanes = 8;
  static constexpr int64_t kAtOnce = 4;
  static constexpr bool kPlaces = false;
  __m256 v;

  static Float set(float s) { return {_mm256_set1_ps(s)}; }
  static Float set_from(double r) { return set(static_cast<float>(r)); }
  // See vec_avx512.h.
  static Float set_inverse(double r) {
    const double inverse = 1.0 / r;
    return set(r > 0 && inverse > __FLT_MAX__ ? __FLT_MAX__ : static_cast<float>(inverse));
  }
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  // n elements of two bytes by way of the stack: there is no masked load of them.
  static __m128i load_halves(const void* p, int64_t n) {
    alignas(16) uint16_t copy[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    __builtin_memcpy(copy, p, static_cast<size_t>(n) * 2);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(copy));
  }
  static void store_halves(void* p, __m128i h, int64_t n) {
    alignas(16) uint16_t copy[8];
    _mm_store_si128(reinterpret_cast<__m128i*>(copy), h);
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * 2);
  }

  static Float load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Float load(const float* p, int64_t n) { return {_mm256_maskload_ps(p, mask(n))}; }
  static Float load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  static Float load(const f16* p, int64_t n) { return {_mm256_cvtph_ps(load_halves(p, n))}; }
  static Float widen(__m128i h) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))}; }
  static Float load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Float load(const bf16* p, int64_t n) { return widen(load_halves(p, n)); }

  __m128i to(const f16*) const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // See vec_avx512.h.
  __m256i bf16_bits() const {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(up, quiet, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
  }
  __m128i to(const bf16*) const {
    const __m256i high = _mm256_srli_epi32(bf16_bits(), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(float* p, int64_t n) const { _mm256_maskstore_ps(p, mask(n), v); }
  void stream(float* p) const { _mm256_stream_ps(p, v); }
  template <class E>
  void store(E* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to(p));
  }
  template <class E>
  void store(E* p, int64_t n) const {
    store_halves(p, to(p), n);
  }
  template <class E>
  void stream(E* p) const {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to(p));
  }
  static void fence() { _mm_sfence(); }

  static Float round_as(Float a, const float*) { return a; }
  static Float round_as(Float a, const f16* p) { return {_mm256_cvtph_ps(a.to(p))}; }
  static Float round_as(Float a, const bf16*) {
    return {_mm256_castsi256_ps(_mm256_and_si256(a.bf16_bits(), _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  template <class E>
  static Float round(Float a) {
    return round_as(a, static_cast<const E*>(nullptr));
  }

  friend Float operator+(Float a, Float b) { return {_mm256_add_ps(a.v, b.v)}; }
  friend Float operator*(Float a, Float b) { return {_mm256_mul_ps(a.v, b.v)}; }
  static Float fma(Float a, Float b, Float c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Float fms(Float a, Float b, Float c) { return {_mm256_fmsub_ps(a.v, b.v, c.v)}; }
  static Float normalise(Float x, Float, Float inverse) { return x * inverse; }
  double sum() const {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return static_cast<double>(_mm_cvtss_f32(s));
  }

  static void hold(Float& a) { __asm__ volatile("" : "+x"(a.v)); }

  struct Doubt {
    __m256i lanes;
    friend Doubt operator|(Doubt a, Doubt b) { return {_mm256_or_si256(a.lanes, b.lanes)}; }
  };
  static bool any(Doubt a) { return _mm256_movemask_epi8(a.lanes) != 0; }
  static __m256i masked(Float a, uint32_t add, uint32_t mask) {
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_set1_epi32(static_cast<int>(add)));
    return _mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(mask)));
  }
  static Doubt zero_bits(Float a, uint32_t add, uint32_t mask) {
    return {_mm256_cmpeq_epi32(masked(a, add, mask), _mm256_setzero_si256())};
  }
  static Doubt smaller(Float a, Float b) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_castps_si256(_mm256_cmp_ps(_mm256_andnot_ps(sign, a.v), _mm256_andnot_ps(sign, b.v), _CMP_NGE_UQ))};
  }
  static Float cut_bits(Float a, uint32_t add, uint32_t mask) { return {_mm256_castsi256_ps(masked(a, add, mask))}; }

  struct Squares {
    __m256d sums[8];

    Squares() {
      for (__m256d& sum : sums) sum = _mm256_setzero_pd();
    }
    void add(int64_t k, Float a) {
      const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.v));
      const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1));
      sums[2 * k] = _mm256_fmadd_pd(low, low, sums[2 * k]);
      sums[2 * k + 1] = _mm256_fmadd_pd(high, high, sums[2 * k + 1]);
    }
    template <class E>
    void add(int64_t k, const E* p) {
      add(k, load(p));
    }
    void add(const Squares& other) {
      for (int k = 0; k < 8; k++) sums[k] = _mm256_add_pd(sums[k], other.sums[k]);
    }
    double sum() const {
      __m256d s[4];
      for (int k = 0; k < 4; k++) s[k] = _mm256_add_pd(sums[k], sums[k + 4]);
      const __m256d four = _mm256_add_pd(_mm256_add_pd(s[0], s[2]), _mm256_add_pd(s[1], s[3]));
      const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
      return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    }
  };
};

struct Double {
  static constexpr int64_t kLanes = 4;
  static constexpr int64_t kAtOnce = 4;
  __m256d v;

  static Double set(double s) { return {_mm256_set1_pd(s)}; }
  static Double set_from(double r) { return set(r); }
  static Double set_inverse(double r) { return set(r); }
  static __m256i mask(int64_t n) { return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)); }
  static Double load(const double* p) { return {_mm256_loadu_pd(p)}; }
  static Double load(const double* p, int64_t n) { return {_mm256_maskload_pd(p, mask(n))}; }
  void store(double* p) const { _mm256_storeu_pd(p, v); }
  void store(double* p, int64_t n) const { _mm256_maskstore_pd(p, mask(n), v); }
  void stream(double* p) const { _mm256_stream_pd(p, v); }
  static void fence() { _mm_sfence(); }
  template <class E>
  static Double round(Double a) {
    return a;
  }
  friend Double operator+(Double a, Double b) { return {_mm256_add_pd(a.v, b.v)}; }
  friend Double operator*(Double a, Double b) { return {_mm256_mul_pd(a.v, b.v)}; }
  static Double fma(Double a, Double b, Double c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
  static Double normalise(Double x, Double r, Double) { return {_mm256_div_pd(x.v, r.v)}; }
  double sum() const {
    const __m128d s = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(s, _mm_unpackhi_pd(s, s)));
  }
};
