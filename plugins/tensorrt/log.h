// Messages for whoever runs TensorRT, through the logger that TensorRT hands over when it loads the library.
#pragma once

#include <NvInferRuntime.h>

#include <string>

namespace rmsnorm_deploy {

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept;

// Without a logger the message goes to standard error: an error must not be lost.
void log_error(const std::string& message) noexcept;

}  // namespace rmsnorm_deploy
