#include "names.h"

namespace rmsnorm_deploy {
namespace {

std::string text_of(const OpName& name) {
  std::string text = name.skip ? "SkipRMSNorm" : "RMSNorm";
  if (name.eps_mode != RMSNORM_EPS_INSIDE) text += std::string("_") + word_of(name.eps_mode);
  if (name.bias) text += "_bias";
  if (name.scale_order == RMSNORM_BEFORE_CAST) text += "_before_cast";
  if (name.double_stash) text += "_double";
  return text;
}

std::vector<OpName> all_names() {
  std::vector<OpName> names;
  for (const bool skip : {false, true}) {
    for (const auto mode : {RMSNORM_EPS_INSIDE, RMSNORM_EPS_OUTSIDE, RMSNORM_EPS_CLAMP}) {
      for (const bool bias : {false, true}) {
        for (const auto order : {RMSNORM_AFTER_CAST, RMSNORM_BEFORE_CAST}) {
          for (const bool double_stash : {false, true}) {
            OpName name{"", skip, mode, bias, order, double_stash};
            name.text = text_of(name);
            names.push_back(name);
          }
        }
      }
    }
  }
  return names;
}

}  // namespace

const std::vector<OpName>& op_names() {
  static const std::vector<OpName> names = all_names();
  return names;
}

}  // namespace rmsnorm_deploy
