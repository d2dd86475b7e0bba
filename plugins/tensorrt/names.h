// The 48 op names of docs/op-spec.md, and what each says.
#pragma once

#include <string>
#include <vector>

#include "../kernels/rms_norm.h"

namespace rmsnorm_deploy {

struct OpName {
  std::string text;
  bool skip;
  rmsnorm_eps_mode eps_mode;
  bool bias;
  rmsnorm_scale_order scale_order;
  bool double_stash;
};

// All of them, in the order of rmsnorm_deploy/opset.py. They live as long as the process.
const std::vector<OpName>& op_names();

inline const char* word_of(rmsnorm_eps_mode mode) {
  return mode == RMSNORM_EPS_INSIDE ? "inside" : mode == RMSNORM_EPS_OUTSIDE ? "outside" : "clamp";
}
inline const char* word_of(rmsnorm_scale_order order) {
  return order == RMSNORM_AFTER_CAST ? "after_cast" : "before_cast";
}

}  // namespace rmsnorm_deploy
