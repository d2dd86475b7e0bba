#include "plugin.h"

#include <algorithm>
#include <exception>
#include <vector>

#include "../kernels/cuda/rms_norm_cuda.h"
#include "log.h"

namespace rmsnorm_deploy {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::PluginTensorDesc;

constexpr int32_t kFailed = -1;
constexpr int32_t kMostAxes = 8;

bool is_float(DataType type) { return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16; }

int32_t dtype_of(DataType type) {
  return type == DataType::kFLOAT ? RMSNORM_F32 : type == DataType::kHALF ? RMSNORM_F16 : RMSNORM_BF16;
}

int64_t product(const Dims& dims, int32_t from, int32_t to) {
  int64_t all = 1;
  for (int32_t i = from; i < to; ++i) all *= dims.d[i];
  return all;
}

std::string shape_text(const Dims& dims) {
  std::string text = "[";
  for (int32_t i = 0; i < dims.nbDims; ++i) text += (i > 0 ? "," : "") + std::to_string(dims.d[i]);
  return text + "]";
}

bool same_shape(const Dims& a, const Dims& b) {
  if (a.nbDims != b.nbDims) return false;
  for (int32_t i = 0; i < a.nbDims; ++i) {
    if (a.d[i] != b.d[i] && a.d[i] >= 0 && b.d[i] >= 0) return false;
  }
  return true;
}

bool known(const Dims& dims, int32_t from) {
  for (int32_t i = from; i < dims.nbDims; ++i) {
    if (dims.d[i] < 0) return false;
  }
  return true;
}

// Calls `work`, and makes what it throws an error message and a status.
template <class Work>
int32_t guarded(const OpName& name, const Work& work) noexcept {
  try {
    const std::string wrong = work();
    if (wrong.empty()) return 0;
    log_error(name.text + ": " + wrong);
  } catch (const std::exception& error) {
    log_error(error.what());
  } catch (...) {
    log_error("unknown failure");
  }
  return kFailed;
}

}  // namespace

NormPlugin::NormPlugin(const OpName& name, const Attributes& attributes) : name_(name), attributes_(attributes) {
  timing_id_ = name.text + ":" + std::to_string(attributes.axis) + ":" + std::to_string(RMSNORM_ABI);
}

NormPlugin::NormPlugin(const NormPlugin& other)
    : nvinfer1::IPluginV3(),
      nvinfer1::IPluginV3OneCore(),
      nvinfer1::IPluginV3OneBuild(),
      nvinfer1::IPluginV3OneRuntime(),
      name_(other.name_),
      attributes_(other.attributes_),
      timing_id_(other.timing_id_),
      inputs_(other.inputs_),
      typical_(other.typical_),
      tactic_(other.tactic_) {}

nvinfer1::IPluginCapability* NormPlugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
  switch (type) {
    case nvinfer1::PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case nvinfer1::PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case nvinfer1::PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* NormPlugin::clone() noexcept {
  try {
    return new NormPlugin(*this);
  } catch (...) {
    log_error(name_.text + ": no memory for a copy");
    return nullptr;
  }
}

const char* NormPlugin::getPluginName() const noexcept { return name_.text.c_str(); }
const char* NormPlugin::getPluginVersion() const noexcept { return kVersion; }
const char* NormPlugin::getPluginNamespace() const noexcept { return kNamespace; }

bool NormPlugin::inputs_of(int32_t count, Inputs* out) const {
  int32_t next = 1;
  *out = Inputs{-1, -1, -1};
  if (name_.skip) out->skip = next++;
  const int32_t with_scale = next + 1 + (name_.bias ? 1 : 0);
  if (count == with_scale) out->scale = next++;
  if (name_.bias) out->bias = next++;
  return count == next;
}

std::string NormPlugin::check_shapes(const PluginTensorDesc* in, int32_t inputs) const {
  Inputs at{};
  if (!inputs_of(inputs, &at)) return "got " + std::to_string(inputs) + " inputs";
  const Dims& x = in[0].dims;
  if (x.nbDims < 1 || x.nbDims > kMostAxes) return "X has " + std::to_string(x.nbDims) + " axes, not 1 to 8";
  if (-attributes_.axis > x.nbDims) {
    return "axis " + std::to_string(attributes_.axis) + " is beyond the axes of X " + shape_text(x);
  }
  if (at.skip >= 0 && !same_shape(x, in[at.skip].dims)) {
    return "skip has shape " + shape_text(in[at.skip].dims) + ", X " + shape_text(x);
  }
  const int32_t first = x.nbDims + attributes_.axis;
  if (!known(x, first)) return "";
  const int64_t width = product(x, first, x.nbDims);
  for (const int32_t parameter : {at.scale, at.bias}) {
    if (parameter < 0 || !known(in[parameter].dims, 0)) continue;
    const Dims& dims = in[parameter].dims;
    const int64_t count = product(dims, 0, dims.nbDims);
    if (count != width && count != 1) {
      return std::string(parameter == at.scale ? "scale" : "bias") + " has shape " + shape_text(dims) +
             ", and a row of X " + shape_text(x) + " has " + std::to_string(width) + " elements";
    }
  }
  return "";
}

int32_t NormPlugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                                    const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept {
  return guarded(name_, [&]() -> std::string {
    PluginTensorDesc descs[kMostAxes];
    if (inputs > kMostAxes) return "got " + std::to_string(inputs) + " inputs";
    for (int32_t i = 0; i < inputs; ++i) descs[i] = in[i].desc;
    const std::string wrong = check_shapes(descs, inputs);
    if (!wrong.empty()) return wrong;
    inputs_ = inputs;
    const Dims& typical = in[0].opt;
    const int32_t first = typical.nbDims + attributes_.axis;
    if (first < 0 || !known(typical, 0)) return "";
    typical_.rows = product(typical, 0, first);
    typical_.width = product(typical, first, typical.nbDims);
    typical_.element_bytes = in[0].desc.type == DataType::kFLOAT ? 4 : 2;
    typical_.aligned = typical_.width * typical_.element_bytes % 16 == 0;
    typical_.may_split = rmsnorm::split_workspace(typical_.width) > 0;
    return "";
  });
}

DataType NormPlugin::output_type(DataType x, const DataType* parameter) const {
  return attributes_.scale_order == RMSNORM_AFTER_CAST && parameter != nullptr ? *parameter : x;
}

int32_t NormPlugin::getOutputDataTypes(DataType* output_types, int32_t outputs, const DataType* input_types,
                                       int32_t inputs) const noexcept {
  return guarded(name_, [&]() -> std::string {
    Inputs at{};
    if (!inputs_of(inputs, &at) || outputs != getNbOutputs()) return "got " + std::to_string(inputs) + " inputs";
    const int32_t parameter = at.scale >= 0 ? at.scale : at.bias;
    output_types[0] = output_type(input_types[0], parameter < 0 ? nullptr : &input_types[parameter]);
    if (name_.skip) output_types[1] = input_types[0];
    return "";
  });
}

int32_t NormPlugin::getOutputShapes(const nvinfer1::DimsExprs* in, int32_t inputs, const nvinfer1::DimsExprs*, int32_t,
                                    nvinfer1::DimsExprs* out, int32_t outputs, nvinfer1::IExprBuilder&) noexcept {
  if (inputs < 1 || outputs != getNbOutputs()) return kFailed;
  for (int32_t i = 0; i < outputs; ++i) out[i] = in[0];
  return 0;
}

bool NormPlugin::supportsFormatCombination(int32_t position, const nvinfer1::DynamicPluginTensorDesc* all,
                                           int32_t inputs, int32_t outputs) noexcept {
  Inputs at{};
  if (!inputs_of(inputs, &at) || outputs != getNbOutputs()) return false;
  const PluginTensorDesc& desc = all[position].desc;
  if (desc.format != nvinfer1::TensorFormat::kLINEAR || !is_float(desc.type)) return false;
  const DataType x = all[0].desc.type;
  const int32_t parameter = at.scale >= 0 ? at.scale : at.bias;
  if (position == 0) return true;
  if (position == at.skip) return desc.type == x;
  if (position == parameter) return desc.type == x || desc.type == DataType::kFLOAT;
  if (position == at.bias) return desc.type == all[parameter].desc.type;
  if (position == inputs) return desc.type == output_type(x, parameter < 0 ? nullptr : &all[parameter].desc.type);
  return desc.type == x;  // sum
}

int32_t NormPlugin::getNbOutputs() const noexcept { return name_.skip ? 2 : 1; }

size_t NormPlugin::getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, int32_t inputs,
                                    const nvinfer1::DynamicPluginTensorDesc*, int32_t) const noexcept {
  if (inputs < 1) return 0;
  const Dims& most = in[0].max;
  const int32_t first = std::max(most.nbDims + attributes_.axis, 0);
  const int64_t width = known(most, first) ? product(most, first, most.nbDims) : INT64_MAX;
  return static_cast<size_t>(rmsnorm::split_workspace(width));
}

std::vector<int32_t> NormPlugin::tactics() const {
  std::vector<int32_t> found;
  rmsnorm::Device device{};
  // Built for a card that is not here: there is nothing to time, and the launch table decides where the engine runs.
  if (typical_.rows < 1 || typical_.width < 1 || !rmsnorm::current_device(&device)) return found;
  for (int32_t tactic = 1; tactic <= rmsnorm::kTactics; ++tactic) {
    if (rmsnorm::tactic_applies(typical_, device, static_cast<rmsnorm::Tactic>(tactic))) found.push_back(tactic);
  }
  return found;
}

int32_t NormPlugin::getNbTactics() noexcept {
  int32_t count = 0;
  guarded(name_, [&]() -> std::string {
    count = static_cast<int32_t>(tactics().size());
    return "";
  });
  return count;
}

int32_t NormPlugin::getValidTactics(int32_t* out, int32_t count) noexcept {
  return guarded(name_, [&]() -> std::string {
    const std::vector<int32_t> found = tactics();
    if (static_cast<int32_t>(found.size()) != count) return "the tactics changed while they were listed";
    std::copy(found.begin(), found.end(), out);
    return "";
  });
}

const char* NormPlugin::getTimingCacheID() noexcept { return timing_id_.c_str(); }

int32_t NormPlugin::setTactic(int32_t tactic) noexcept {
  // 0 is TensorRT's own: no tactic was offered or chosen.
  if (tactic < 0 || tactic > rmsnorm::kTactics) {
    log_error(name_.text + ": no such tactic");
    return kFailed;
  }
  tactic_ = tactic == 0 ? rmsnorm::Tactic::kTable : static_cast<rmsnorm::Tactic>(tactic);
  return 0;
}

int32_t NormPlugin::onShapeChange(const PluginTensorDesc* in, int32_t inputs, const PluginTensorDesc*,
                                  int32_t) noexcept {
  return guarded(name_, [&] {
    inputs_ = inputs;
    return check_shapes(in, inputs);
  });
}

int32_t NormPlugin::enqueue(const PluginTensorDesc* in_descs, const PluginTensorDesc* out_descs, const void* const* in,
                            void* const* out, void* workspace, cudaStream_t stream) noexcept {
  return guarded(name_, [&]() -> std::string {
    Inputs at{};
    if (!inputs_of(inputs_, &at)) return "enqueued before its shapes were known";
    const Dims& x = in_descs[0].dims;
    const int32_t first = x.nbDims + attributes_.axis;
    rmsnorm_args args{};
    args.abi = RMSNORM_ABI;
    args.x_dtype = dtype_of(in_descs[0].type);
    args.y_dtype = dtype_of(out_descs[0].type);
    args.param_dtype = args.x_dtype;
    args.eps_mode = attributes_.eps_mode;
    args.scale_order = attributes_.scale_order;
    args.eps = attributes_.epsilon;
    args.rows = product(x, 0, first);
    args.width = product(x, first, x.nbDims);
    args.x_stride = args.skip_stride = args.y_stride = args.sum_stride = args.width;
    args.x = in[0];
    args.y = out[0];
    if (at.skip >= 0) args.skip = in[at.skip];
    if (at.skip >= 0) args.sum = out[1];
    if (at.scale >= 0) {
      args.scale = in[at.scale];
      args.scale_count = product(in_descs[at.scale].dims, 0, in_descs[at.scale].dims.nbDims);
      args.param_dtype = dtype_of(in_descs[at.scale].type);
    }
    if (at.bias >= 0) {
      args.bias = in[at.bias];
      args.bias_count = product(in_descs[at.bias].dims, 0, in_descs[at.bias].dims.nbDims);
      args.param_dtype = dtype_of(in_descs[at.bias].type);
    }
    // getWorkspaceSize asked for as much, for the longest rows.
    args.workspace = workspace;
    args.workspace_bytes = workspace == nullptr ? 0 : rmsnorm::split_workspace(args.width);
    const rmsnorm_status status = rmsnorm::run_on_cuda(args, stream, tactic_);
    return status == RMSNORM_OK ? "" : rmsnorm_status_string(status);
  });
}

nvinfer1::IPluginV3* NormPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

const nvinfer1::PluginFieldCollection* NormPlugin::getFieldsToSerialize() noexcept {
  try {
    return serialized_.refresh(attributes_);
  } catch (...) {
    log_error(name_.text + ": no memory for the fields");
    return nullptr;
  }
}

}  // namespace rmsnorm_deploy
