// AArch64 Advanced SIMD vectors for rows_impl.h. There is no store past the caches worth having: stream is store.

struct Float {
  static constexpr int64_t kLanes = 4;
  static constexpr int64_t kAtOnce = 4;
  static constexpr bool kPlaces = false;
  float32x4_t v;

  static Float set(float s) { return {vdupq_n_f32(s)}; }
  static Float set_from(double r) { return set(static_cast<float>(r)); }
  // See vec_avx512.h.
  static Float set_inverse(double r) {
    const double inverse = 1.0 / r;
    return set(r > 0 && inverse > __FLT_MAX__ ? __FLT_MAX__ : static_cast<float>(inverse));
  }

  static Float load(const float* p) { return {vld1q_f32(p)}; }
  static uint16x4_t bits(const void* p) { return vld1_u16(static_cast<const uint16_t*>(p)); }
  static Float load(const f16* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(bits(p)))}; }
  static Float load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(bits(p), 16))}; }
  template <class E>
  static Float load(const E* p, int64_t n) {
    E copy[4] = {};
    __builtin_memcpy(copy, p, static_cast<size_t>(n) * sizeof(E));
    return load(copy);
  }

  // See vec_avx512.h.
  uint32x4_t bf16_bits() const {
    const uint32x4_t u = vreinterpretq_u32_f32(v);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t up = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    return vbslq_u32(vceqq_f32(v, v), up, vorrq_u32(u, vdupq_n_u32(0x400000)));
  }
  uint16x4_t to(const f16*) const { return vreinterpret_u16_f16(vcvt_f16_f32(v)); }
  uint16x4_t to(const bf16*) const { return vshrn_n_u32(bf16_bits(), 16); }

  void store(float* p) const { vst1q_f32(p, v); }
  template <class E>
  void store(E* p) const {
    vst1_u16(&p->bits, to(p));
  }
  template <class E>
  void store(E* p, int64_t n) const {
    E copy[4];
    store(copy);
    __builtin_memcpy(p, copy, static_cast<size_t>(n) * sizeof(E));
  }
  template <class E>
  void stream(E* p) const {
    store(p);
  }
  static void fence() {}

  static Float round_as(Float a, const float*) { return a; }
  static Float round_as(Float a, const f16*) { return {vcvt_f32_f16(vcvt_f16_f32(a.v))}; }
  static Float round_as(Float a, const bf16*) {
    return {vreinterpretq_f32_u32(vandq_u32(a.bf16_bits(), vdupq_n_u32(0xffff0000u)))};
  }
  template <class E>
  static Float round(Float a) {
    return round_as(a, static_cast<const E*>(nullptr));
  }

  friend Float operator+(Float a, Float b) { return {vaddq_f32(a.v, b.v)}; }
  friend Float operator*(Float a, Float b) { return {vmulq_f32(a.v, b.v)}; }
  static Float fma(Float a, Float b, Float c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
  static Float fms(Float a, Float b, Float c) { return {vfmaq_f32(vnegq_f32(c.v), a.v, b.v)}; }
  static Float normalise(Float x, Float, Float inverse) { return x * inverse; }
  double sum() const { return static_cast<double>(vaddvq_f32(v)); }

  static void hold(Float& a) { __asm__ volatile("" : "+w"(a.v)); }

  struct Doubt {
    uint32x4_t lanes;
    friend Doubt operator|(Doubt a, Doubt b) { return {vorrq_u32(a.lanes, b.lanes)}; }
  };
  static bool any(Doubt a) { return vmaxvq_u32(a.lanes) != 0; }
  static uint32x4_t masked(Float a, uint32_t add, uint32_t mask) {
    return vandq_u32(vaddq_u32(vreinterpretq_u32_f32(a.v), vdupq_n_u32(add)), vdupq_n_u32(mask));
  }
  static Doubt zero_bits(Float a, uint32_t add, uint32_t mask) { return {vceqzq_u32(masked(a, add, mask))}; }
  static Doubt smaller(Float a, Float b) { return {vmvnq_u32(vcageq_f32(a.v, b.v))}; }
  static Float cut_bits(Float a, uint32_t add, uint32_t mask) { return {vreinterpretq_f32_u32(masked(a, add, mask))}; }

  struct Squares {
    float64x2_t sums[16];

    Squares() {
      for (float64x2_t& sum : sums) sum = vdupq_n_f64(0);
    }
    void add(int64_t k, Float a) {
      const float64x2_t low = vcvt_f64_f32(vget_low_f32(a.v));
      const float64x2_t high = vcvt_high_f64_f32(a.v);
      sums[2 * k] = vfmaq_f64(sums[2 * k], low, low);
      sums[2 * k + 1] = vfmaq_f64(sums[2 * k + 1], high, high);
    }
    template <class E>
    void add(int64_t k, const E* p) {
      add(k, load(p));
    }
    void add(const Squares& other) {
      for (int k = 0; k < 16; k++) sums[k] = vaddq_f64(sums[k], other.sums[k]);
    }
    double sum() const {
      float64x2_t s[8];
      for (int k = 0; k < 8; k++) s[k] = vaddq_f64(sums[k], sums[k + 8]);
      for (int half = 4; half > 0; half /= 2) {
        for (int k = 0; k < half; k++) s[k] = vaddq_f64(s[k], s[k + half]);
      }
      return vaddvq_f64(s[0]);
    }
  };
};

struct Double {
  static constexpr int64_t kLanes = 2;
  static constexpr int64_t kAtOnce = 4;
  float64x2_t v;

  static Double set(double s) { return {vdupq_n_f64(s)}; }
  static Double set_from(double r) { return set(r); }
  static Double set_inverse(double r) { return set(r); }
  static Double load(const double* p) { return {vld1q_f64(p)}; }
  static Double load(const double* p, int64_t) { return {vsetq_lane_f64(*p, vdupq_n_f64(0), 0)}; }
  void store(double* p) const { vst1q_f64(p, v); }
  void store(double* p, int64_t) const { *p = vgetq_lane_f64(v, 0); }
  void stream(double* p) const { store(p); }
  static void fence() {}
  template <class E>
  static Double round(Double a) {
    return a;
  }
  friend Double operator+(Double a, Double b) { return {vaddq_f64(a.v, b.v)}; }
  friend Double operator*(Double a, Double b) { return {vmulq_f64(a.v, b.v)}; }
  static Double fma(Double a, Double b, Double c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
  static Double normalise(Double x, Double r, Double) { return {vdivq_f64(x.v, r.v)}; }
  double sum() const { return vaddvq_f64(v); }
};
