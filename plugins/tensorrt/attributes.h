// A norm's attributes: read from the fields that the ONNX parser or an engine hands over, and written back for an
// engine.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "names.h"

namespace rmsnorm_deploy {

struct Attributes {
  int32_t axis = -1;
  float epsilon = 1e-6F;
  float epsilon_low = 0.0F;
  rmsnorm_eps_mode eps_mode = RMSNORM_EPS_INSIDE;
  rmsnorm_scale_order scale_order = RMSNORM_AFTER_CAST;
  int32_t stash_type = 1;
};

// From an ONNX node an absent field has its default; from an engine all must be there. Throws std::runtime_error that
// names the field which is unknown, missing, of another type, or at odds with the op's name.
Attributes parse_attributes(const OpName& name, const nvinfer1::PluginFieldCollection& fields, bool from_engine);

// What createPlugin reads, by name and type.
const nvinfer1::PluginFieldCollection& declared_fields();

// Fields that point into this object; so it does not move.
class SerializedAttributes {
 public:
  SerializedAttributes() = default;
  SerializedAttributes(const SerializedAttributes&) = delete;
  SerializedAttributes& operator=(const SerializedAttributes&) = delete;

  const nvinfer1::PluginFieldCollection* refresh(const Attributes& attributes);

 private:
  Attributes values_;
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace rmsnorm_deploy
