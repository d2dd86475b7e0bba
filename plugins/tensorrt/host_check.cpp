// Drives the plugin library the way TensorRT does, without TensorRT and without a GPU: creation, fields, copies, types,
// formats, shapes and refusals. Prints one line a failed check, and returns how many there were.
//   host_check librmsnorm_deploy_tensorrt.so
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace nvinfer1;  // NOLINT: the whole file is about it

int failures = 0;
std::string last_message;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("failed: %s (last message: %s)\n", what.c_str(), last_message.c_str());
}

class Logger final : public ILogger {
 public:
  void log(Severity, const AsciiChar* message) noexcept override { last_message = message; }
};

class Finder final : public ILoggerFinder {
 public:
  ILogger* findLogger() override { return &logger_; }

 private:
  Logger logger_;
};

struct Fields {
  int32_t axis = -1;
  float epsilon = 1e-5F;
  float epsilon_low = 1e-13F;
  std::string mode = "inside";
  std::string order = "after_cast";
  int32_t stash = 1;

  std::vector<PluginField> list() const {
    return {{"axis", &axis, PluginFieldType::kINT32, 1},
            {"epsilon", &epsilon, PluginFieldType::kFLOAT32, 1},
            {"epsilon_low", &epsilon_low, PluginFieldType::kFLOAT32, 1},
            {"epsilon_mode", mode.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(mode.size()) + 1},
            {"scale_order", order.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(order.size())},
            {"stash_type", &stash, PluginFieldType::kINT32, 1}};
  }
};

std::unique_ptr<IPluginV3> create(IPluginCreatorV3One& creator, const std::vector<PluginField>& fields,
                                  TensorRTPhase phase) {
  last_message.clear();
  const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
  return std::unique_ptr<IPluginV3>(creator.createPlugin("layer", &collection, phase));
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

template <class Capability>
Capability& capability(IPluginV3& plugin, PluginCapabilityType type) {
  return *static_cast<Capability*>(plugin.getCapabilityInterface(type));
}

DynamicPluginTensorDesc tensor(DataType type, const std::vector<int64_t>& shape,
                               TensorFormat format = TensorFormat::kLINEAR) {
  DynamicPluginTensorDesc out{};
  out.desc.type = type;
  out.desc.format = format;
  out.desc.dims.nbDims = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) out.desc.dims.d[i] = static_cast<int32_t>(shape[i]);
  out.min = out.max = out.opt = out.desc.dims;
  return out;
}

bool supported(IPluginV3& plugin, std::vector<DynamicPluginTensorDesc> all, int32_t outputs) {
  auto& build = capability<IPluginV3OneBuild>(plugin, PluginCapabilityType::kBUILD);
  const auto count = static_cast<int32_t>(all.size());
  for (int32_t i = 0; i < count; ++i) {
    if (!build.supportsFormatCombination(i, all.data(), count - outputs, outputs)) return false;
  }
  return true;
}

void check_fields(IPluginCreatorV3One& creator) {
  const Fields fields;
  for (const auto phase : {TensorRTPhase::kBUILD, TensorRTPhase::kRUNTIME}) {
    auto plugin = create(creator, fields.list(), phase);
    expect(plugin != nullptr, "a plugin with all fields");
    if (!plugin) return;
    // Round trip: what one writes, the next reads and writes again; a copy writes the same.
    std::unique_ptr<IPluginV3> copy(plugin->clone());
    plugin.reset();
    auto& runtime = capability<IPluginV3OneRuntime>(*copy, PluginCapabilityType::kRUNTIME);
    const PluginFieldCollection* written = runtime.getFieldsToSerialize();
    expect(written != nullptr && written->nbFields == 6, "six fields are written");
    std::vector<PluginField> again(written->fields, written->fields + written->nbFields);
    auto second = create(creator, again, TensorRTPhase::kRUNTIME);
    expect(second != nullptr, "an engine's fields make the plugin again");
    for (const PluginField& field : again) {
      if (std::strcmp(field.name, "epsilon_low") == 0) {
        expect(*static_cast<const float*>(field.data) == fields.epsilon_low, "epsilon_low as given");
      }
    }
    std::unique_ptr<IPluginV3> attached(runtime.attachToContext(nullptr));
    expect(attached != nullptr, "a context's own copy");
  }
  for (int skipped = 0; skipped < 6; ++skipped) {
    auto some = fields.list();
    const std::string name = some[static_cast<size_t>(skipped)].name;
    some.erase(some.begin() + skipped);
    expect(!create(creator, some, TensorRTPhase::kRUNTIME) && has(last_message, "'" + name + "' is missing"),
           "an engine without " + name + " is refused by name");
    expect(create(creator, some, TensorRTPhase::kBUILD) != nullptr, "a node without " + name + " has its default");
  }
  auto more = fields.list();
  more.push_back({"gamma", &fields.axis, PluginFieldType::kINT32, 1});
  expect(!create(creator, more, TensorRTPhase::kBUILD) && has(last_message, "'gamma' is unknown"), "an unknown field");
}

void check_bad_values(IPluginCreatorV3One& creator) {
  const auto refused = [&](const Fields& fields, const std::string& name) {
    expect(!create(creator, fields.list(), TensorRTPhase::kBUILD) && has(last_message, "'" + name + "'"),
           "a bad " + name + " is refused by name");
  };
  Fields bad;
  bad.axis = 0;
  refused(bad, "axis");
  bad = Fields{};
  bad.epsilon = -1;
  refused(bad, "epsilon");
  bad = Fields{};
  bad.mode = "clamp";  // the op's name says inside
  refused(bad, "epsilon_mode");
  bad = Fields{};
  bad.order = "sideways";
  refused(bad, "scale_order");
  bad = Fields{};
  bad.stash = 11;
  refused(bad, "stash_type");
  const Fields good;
  auto wrong_type = good.list();
  wrong_type[1].type = PluginFieldType::kINT32;
  expect(!create(creator, wrong_type, TensorRTPhase::kBUILD) && has(last_message, "'epsilon' is not a float"),
         "a field of another type");
}

void check_types(IPluginCreatorV3One& norm, IPluginCreatorV3One& skip_before) {
  const auto f32 = DataType::kFLOAT;
  const auto f16 = DataType::kHALF;
  const auto bf16 = DataType::kBF16;
  auto plugin = create(norm, Fields{}.list(), TensorRTPhase::kBUILD);
  const auto x = [](DataType type) { return tensor(type, {2, 3, 64}); };
  const auto w = [](DataType type) { return tensor(type, {64}); };
  expect(supported(*plugin, {x(f16), w(f16), x(f16)}, 1), "half");
  expect(supported(*plugin, {x(bf16), w(f32), x(f32)}, 1), "bfloat16 x, float scale, float y");
  expect(!supported(*plugin, {x(bf16), w(f32), x(bf16)}, 1), "y is the wider type after the cast");
  expect(!supported(*plugin, {x(f32), w(f16), x(f32)}, 1), "a scale narrower than x");
  expect(!supported(*plugin, {x(f16), w(bf16), x(f16)}, 1), "half x with a bfloat16 scale");
  expect(!supported(*plugin, {x(DataType::kINT32), w(DataType::kINT32), x(DataType::kINT32)}, 1), "integers");
  expect(!supported(*plugin, {tensor(f16, {2, 3, 64}, TensorFormat::kCHW2), w(f16), x(f16)}, 1), "another layout");
  expect(supported(*plugin, {x(f16), x(f16)}, 1), "no scale");

  Fields before;
  before.order = "before_cast";
  auto skip = create(skip_before, before.list(), TensorRTPhase::kBUILD);
  expect(supported(*skip, {x(f16), x(f16), w(f32), x(f16), x(f16)}, 2), "before the cast y has x's type");
  auto& build = capability<IPluginV3OneBuild>(*skip, PluginCapabilityType::kBUILD);
  const DataType in[] = {bf16, bf16, f32};
  DataType out[2] = {};
  expect(build.getNbOutputs() == 2 && build.getOutputDataTypes(out, 2, in, 3) == 0 && out[0] == bf16 && out[1] == bf16,
         "types of y and sum");
  expect(build.getOutputDataTypes(out, 2, in, 1) != 0, "too few inputs");
}

void check_shapes(IPluginCreatorV3One& creator) {
  const auto configure = [&](const Fields& fields, const std::vector<DynamicPluginTensorDesc>& all) {
    auto plugin = create(creator, fields.list(), TensorRTPhase::kBUILD);
    auto& build = capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD);
    const auto inputs = static_cast<int32_t>(all.size()) - 1;
    const int32_t status = build.configurePlugin(all.data(), inputs, all.data() + inputs, 1);
    expect(status != 0 || build.getNbTactics() >= 0, "tactics can be counted");
    return status == 0;
  };
  const auto half = DataType::kHALF;
  std::vector<int64_t> shape;
  for (int rank = 1; rank <= 8; ++rank) {
    shape.insert(shape.begin(), rank == 1 ? 64 : -1);
    const auto x = tensor(half, shape);
    expect(configure(Fields{}, {x, tensor(half, {64}), x}), "rank " + std::to_string(rank));
  }
  Fields two;
  two.axis = -2;
  const auto x = tensor(half, {-1, 4, 64});
  expect(configure(two, {x, tensor(half, {4, 64}), x}), "two axes");
  expect(configure(two, {x, tensor(half, {1, 4, 64}), x}), "a scale with leading ones");
  expect(configure(two, {x, tensor(half, {1}), x}), "a scale of one element");
  expect(!configure(two, {x, tensor(half, {64}), x}) && has(last_message, "scale has shape [64]"), "another width");
  Fields beyond;
  beyond.axis = -4;
  expect(!configure(beyond, {x, tensor(half, {64}), x}) && has(last_message, "axis -4"), "an axis beyond the rank");
}

// Enough for the longest rows of the profile, and nothing for rows that no card splits.
void check_workspace(IPluginCreatorV3One& creator) {
  const auto workspace = [&](const std::vector<int64_t>& most) {
    auto plugin = create(creator, Fields{}.list(), TensorRTPhase::kBUILD);
    auto x = tensor(DataType::kHALF, {-1, -1});
    x.max = tensor(DataType::kHALF, most).desc.dims;
    const DynamicPluginTensorDesc all[] = {x, x, x};
    return capability<IPluginV3OneBuild>(*plugin, PluginCapabilityType::kBUILD).getWorkspaceSize(all, 2, all + 2, 1);
  };
  expect(workspace({32, 4096}) == 0, "no workspace for short rows");
  expect(workspace({32, 262144}) > 0 && workspace({32, 262144}) <= 16384, "a workspace for long rows");
  expect(workspace({32, 262144}) == workspace({-1, -1}), "a workspace for rows of any length");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* const library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("failed: %s\n", dlerror());
    return 1;
  }
  using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
  using SetFinder = void (*)(ILoggerFinder*);
  Finder finder;
  reinterpret_cast<SetFinder>(dlsym(library, "setLoggerFinder"))(&finder);
  int32_t count = 0;
  IPluginCreatorInterface* const* creators = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"))(count);
  expect(count == 48, "48 creators");
  std::set<std::string> names;
  IPluginCreatorV3One* norm = nullptr;
  IPluginCreatorV3One* skip_before = nullptr;
  for (int32_t i = 0; i < count; ++i) {
    auto* const creator = static_cast<IPluginCreatorV3One*>(creators[i]);
    const std::string name = creator->getPluginName();
    names.insert(name);
    if (name == "RMSNorm") norm = creator;
    if (name == "SkipRMSNorm_before_cast") skip_before = creator;
    expect(std::strcmp(creator->getPluginNamespace(), "rmsnorm_deploy") == 0, "the namespace");
    expect(std::strcmp(creator->getPluginVersion(), "1") == 0, "the version");
    std::printf("creator %s\n", name.c_str());
  }
  expect(names.size() == 48 && norm != nullptr && skip_before != nullptr, "all names differ");
  if (failures == 0) {
    check_fields(*norm);
    check_bad_values(*norm);
    check_types(*norm, *skip_before);
    check_shapes(*norm);
    check_workspace(*norm);
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
