// The 48 op names of docs/op-spec.md, taken apart.
#ifndef RMSNORM_DEPLOY_ORT_NAMES_H_
#define RMSNORM_DEPLOY_ORT_NAMES_H_

#include "../kernels/rms_norm.h"

namespace rmsnorm_ort {

struct Variant {
  bool skip;
  rmsnorm_eps_mode eps_mode;
  bool bias;
  rmsnorm_scale_order scale_order;
  rmsnorm_stash stash;
};

constexpr int kVariants = 2 * 3 * 2 * 2 * 2;
constexpr int kNameBytes = 48;

inline Variant variant(int index) {
  return {index / 24 == 1, static_cast<rmsnorm_eps_mode>(index / 8 % 3), index / 4 % 2 == 1,
          static_cast<rmsnorm_scale_order>(index / 2 % 2), static_cast<rmsnorm_stash>(index % 2)};
}

// ("RMSNorm" | "SkipRMSNorm") ["_outside" | "_clamp"] ["_bias"] ["_before_cast"] ["_double"]
inline void write_name(const Variant& v, char* out) {
  const char* const parts[] = {v.skip ? "SkipRMSNorm" : "RMSNorm",
                               v.eps_mode == RMSNORM_EPS_OUTSIDE ? "_outside"
                               : v.eps_mode == RMSNORM_EPS_CLAMP ? "_clamp"
                                                                 : "",
                               v.bias ? "_bias" : "", v.scale_order == RMSNORM_BEFORE_CAST ? "_before_cast" : "",
                               v.stash == RMSNORM_STASH_F64 ? "_double" : ""};
  for (const char* part : parts) {
    while (*part) *out++ = *part++;
  }
  *out = '\0';
}

}  // namespace rmsnorm_ort

#endif  // RMSNORM_DEPLOY_ORT_NAMES_H_
