// Makes the plugin of one op name, from an ONNX node's attributes or from an engine's fields.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

#include "names.h"

namespace rmsnorm_deploy {

class NormCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit NormCreator(const OpName& name) : name_(name) {}

  nvinfer1::IPluginV3* createPlugin(const char* layer, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override;
  const char* getPluginName() const noexcept override;
  const char* getPluginVersion() const noexcept override;
  const char* getPluginNamespace() const noexcept override;

 private:
  const OpName& name_;
};

// One of each name. They live as long as the process.
const std::vector<nvinfer1::IPluginCreatorInterface*>& all_creators();

}  // namespace rmsnorm_deploy
