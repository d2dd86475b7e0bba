// The TensorRT layer: RMSNorm or SkipRMSNorm with its attributes. Everything here is called by TensorRT, from any of
// its threads but one at a time an object, and nothing throws.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

#include "../kernels/cuda/launch.h"
#include "attributes.h"
#include "names.h"

namespace rmsnorm_deploy {

constexpr const char* kNamespace = "rmsnorm_deploy";
constexpr const char* kVersion = "1";

class NormPlugin final : public nvinfer1::IPluginV3,
                         public nvinfer1::IPluginV3OneCore,
                         public nvinfer1::IPluginV3OneBuild,
                         public nvinfer1::IPluginV3OneRuntime {
 public:
  NormPlugin(const OpName& name, const Attributes& attributes);
  NormPlugin(const NormPlugin& other);
  ~NormPlugin() override = default;

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override;
  const char* getPluginVersion() const noexcept override;
  const char* getPluginNamespace() const noexcept override;

  // IPluginV3OneBuild
  int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out, int32_t outputs) noexcept override;
  int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t outputs, const nvinfer1::DataType* input_types,
                             int32_t inputs) const noexcept override;
  int32_t getOutputShapes(const nvinfer1::DimsExprs* in, int32_t inputs, const nvinfer1::DimsExprs* shape_inputs,
                          int32_t shape_input_count, nvinfer1::DimsExprs* out, int32_t outputs,
                          nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* all, int32_t inputs,
                                 int32_t outputs) noexcept override;
  int32_t getNbOutputs() const noexcept override;
  size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                          const nvinfer1::DynamicPluginTensorDesc* out, int32_t outputs) const noexcept override;
  int32_t getNbTactics() noexcept override;
  int32_t getValidTactics(int32_t* tactics, int32_t count) noexcept override;
  const char* getTimingCacheID() noexcept override;

  // IPluginV3OneRuntime
  int32_t setTactic(int32_t tactic) noexcept override;
  int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, int32_t inputs, const nvinfer1::PluginTensorDesc* out,
                        int32_t outputs) noexcept override;
  int32_t enqueue(const nvinfer1::PluginTensorDesc* in_descs, const nvinfer1::PluginTensorDesc* out_descs,
                  const void* const* in, void* const* out, void* workspace, cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  // Which of TensorRT's inputs is what: -1 where it is absent. Only the scale may be.
  struct Inputs {
    int32_t skip;
    int32_t scale;
    int32_t bias;
  };
  bool inputs_of(int32_t count, Inputs* out) const;
  std::string check_shapes(const nvinfer1::PluginTensorDesc* in, int32_t inputs) const;
  std::vector<int32_t> tactics() const;
  nvinfer1::DataType output_type(nvinfer1::DataType x, const nvinfer1::DataType* parameter) const;

  const OpName& name_;
  Attributes attributes_;
  SerializedAttributes serialized_;
  std::string timing_id_;
  int32_t inputs_ = 0;          // how many there are, from configurePlugin or onShapeChange on
  rmsnorm::Problem typical_{};  // the profile's optimum, which tactics are listed for
  rmsnorm::Tactic tactic_ = rmsnorm::Tactic::kTable;
};

}  // namespace rmsnorm_deploy
