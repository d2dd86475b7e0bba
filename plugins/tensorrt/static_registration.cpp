// For hosts that only open a library and expect its plugins in the registry, such as ONNX Runtime's TensorRT provider:
// the plugins are registered while the library loads. The registry is that of the TensorRT which the process already
// has; its major version must be the headers', because the registry's layout is not the same in others.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <string>

#include "creator.h"
#include "log.h"
#include "plugin.h"

#define RMSNORM_TEXT_OF(x) #x
#define RMSNORM_TEXT(x) RMSNORM_TEXT_OF(x)

namespace rmsnorm_deploy {
namespace {

using GetRegistry = nvinfer1::IPluginRegistry* (*)();

GetRegistry find_registry() {
  void* const library = dlopen("libnvinfer.so." RMSNORM_TEXT(NV_TENSORRT_MAJOR), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  return reinterpret_cast<GetRegistry>(dlsym(library, "getPluginRegistry"));
}

__attribute__((constructor)) void register_all() noexcept {
  try {
    const GetRegistry get_registry = find_registry();
    nvinfer1::IPluginRegistry* const registry = get_registry == nullptr ? nullptr : get_registry();
    if (registry == nullptr) {
      log_error("this library is for TensorRT " RMSNORM_TEXT(NV_TENSORRT_MAJOR) ", which the process has not loaded");
      return;
    }
    for (nvinfer1::IPluginCreatorInterface* const creator : all_creators())
      registry->registerCreator(*creator, kNamespace);
  } catch (...) {
    log_error("the plugins could not be registered");
  }
}

}  // namespace
}  // namespace rmsnorm_deploy
