// A stand-in for libnvinfer with nothing but a plugin registry that counts, to see the static registration work.
#include <NvInferRuntime.h>

#include <cstdio>
#include <string>

namespace {

using namespace nvinfer1;  // NOLINT: the whole file is about it

class CountingRegistry final : public IPluginRegistry {
 public:
  ~CountingRegistry() noexcept override = default;
  bool registerCreator(IPluginCreator&, const AsciiChar*) noexcept override { return false; }
  IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override {
    *count = 0;
    return nullptr;
  }
  IPluginCreator* getPluginCreator(const AsciiChar*, const AsciiChar*, const AsciiChar*) noexcept override {
    return nullptr;
  }
  void setErrorRecorder(IErrorRecorder*) noexcept override {}
  IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
  bool deregisterCreator(const IPluginCreator&) noexcept override { return false; }
  bool isParentSearchEnabled() const override { return false; }
  void setParentSearchEnabled(bool) override {}
  PluginLibraryHandle loadLibrary(const AsciiChar*) noexcept override { return nullptr; }
  void deregisterLibrary(PluginLibraryHandle) noexcept override {}
  bool registerCreator(IPluginCreatorInterface& creator, const AsciiChar* name_space) noexcept override {
    const auto& one = static_cast<IPluginCreatorV3One&>(creator);
    std::printf("registered %s::%s\n", name_space, one.getPluginName());
    return true;
  }
  IPluginCreatorInterface* const* getAllCreators(int32_t* count) const noexcept override {
    *count = 0;
    return nullptr;
  }
  IPluginCreatorInterface* getCreator(const AsciiChar*, const AsciiChar*, const AsciiChar*) noexcept override {
    return nullptr;
  }
  bool deregisterCreator(const IPluginCreatorInterface&) noexcept override { return false; }
  IPluginResource* acquirePluginResource(const AsciiChar*, IPluginResource*) noexcept override { return nullptr; }
  int32_t releasePluginResource(const AsciiChar*) noexcept override { return 0; }
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* count) noexcept override {
    *count = 0;
    return nullptr;
  }
};

CountingRegistry registry;

}  // namespace

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginRegistry* getPluginRegistry() noexcept {
  return &registry;
}
