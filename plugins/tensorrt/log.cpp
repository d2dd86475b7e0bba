#include "log.h"

#include <atomic>
#include <cstdio>

namespace rmsnorm_deploy {
namespace {

std::atomic<nvinfer1::ILoggerFinder*> logger_finder{nullptr};

}  // namespace

void set_logger_finder(nvinfer1::ILoggerFinder* finder) noexcept { logger_finder.store(finder); }

void log_error(const std::string& message) noexcept {
  try {
    const std::string line = "rmsnorm_deploy: " + message;
    nvinfer1::ILoggerFinder* const finder = logger_finder.load();
    nvinfer1::ILogger* const logger = finder == nullptr ? nullptr : finder->findLogger();
    if (logger != nullptr) {
      logger->log(nvinfer1::ILogger::Severity::kERROR, line.c_str());
    } else {
      std::fprintf(stderr, "%s\n", line.c_str());
    }
  } catch (...) {
    // There is nobody left to tell.
  }
}

}  // namespace rmsnorm_deploy
