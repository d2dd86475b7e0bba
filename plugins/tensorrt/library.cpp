// What TensorRT looks for in a plugin library, and what an engine's builder asks of this one. Nothing of TensorRT's own
// libraries is needed to load it.
#include <NvInferRuntime.h>

#include "creator.h"
#include "log.h"

extern "C" __attribute__((visibility("default"))) nvinfer1::IPluginCreatorInterface* const* getCreators(
    int32_t& count) noexcept {
  count = 0;
  try {
    const auto& creators = rmsnorm_deploy::all_creators();
    count = static_cast<int32_t>(creators.size());
    return creators.data();
  } catch (...) {
    rmsnorm_deploy::log_error("no memory for the plugin creators");
    return nullptr;
  }
}

extern "C" __attribute__((visibility("default"))) void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept {
  rmsnorm_deploy::set_logger_finder(finder);
}

// The compute capabilities that there is machine code for, as "80,120"; of the last there is PTX too.
extern "C" __attribute__((visibility("default"))) const char* rmsnorm_deploy_architectures() noexcept {
  return RMSNORM_ARCHITECTURES;
}
