#include "rms_norm_cuda.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "norm_call.h"

namespace rmsnorm {
namespace {

constexpr int kMostDevices = 64;
constexpr int kFreeSharedBytes = 48 * 1024;  // what a block may ask for without raising the kernel's limit

bool attribute(cudaDeviceAttr which, int device, int* value) {
  return cudaDeviceGetAttribute(value, which, device) == cudaSuccess;
}

bool ask_device(int index, Device* device) {
  int major = 0;
  int minor = 0;
  const bool known = attribute(cudaDevAttrComputeCapabilityMajor, index, &major) &&
                     attribute(cudaDevAttrComputeCapabilityMinor, index, &minor) &&
                     attribute(cudaDevAttrMultiProcessorCount, index, &device->multiprocessors) &&
                     attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index, &device->shared_bytes);
  device->compute = 10 * major + minor;
  return known;
}

// Clears what a refused call left behind, so that the next caller does not read it as its own.
rmsnorm_status refused(cudaError_t error) {
  (void)cudaGetLastError();
  const bool not_built = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  return not_built ? RMSNORM_UNSUPPORTED : RMSNORM_DEVICE_ERROR;
}

// CUDA graphs hold such launches since 12.3, and any launch may be captured in one.
bool starts_early(const Device& device) {
  static const bool captured = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12030;
  }();
  return captured && device.compute >= 90;
}

rmsnorm_status queue(const Step& step, const Launch& launch, const Device& device, cudaStream_t stream) {
  const void* const kernel = reinterpret_cast<const void*>(step.kernel);
  if (launch.shared_bytes > kFreeSharedBytes) {
    const auto which = cudaFuncAttributeMaxDynamicSharedMemorySize;
    const cudaError_t error = cudaFuncSetAttribute(kernel, which, launch.shared_bytes);
    if (error != cudaSuccess) return refused(error);
  }
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.blocks));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (starts_early(device)) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = static_cast<unsigned>(launch.cluster);
    attributes[config.numAttrs].val.clusterDim.y = 1;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  KernelArgs args = step.args;
  void* parameters[] = {&args};
  const cudaError_t error = cudaLaunchKernelExC(&config, kernel, parameters);
  return error == cudaSuccess ? RMSNORM_OK : refused(error);
}

}  // namespace

bool current_device(Device* device) {
  static Device known[kMostDevices];
  static std::atomic<bool> asked[kMostDevices];
  static std::atomic_flag writing = ATOMIC_FLAG_INIT;
  int index = 0;
  if (cudaGetDevice(&index) != cudaSuccess || index < 0) return false;
  if (index < kMostDevices && asked[index].load(std::memory_order_acquire)) {
    *device = known[index];
    return true;
  }
  if (!ask_device(index, device)) return false;
  // Whoever finds another thread at it leaves the remembering to that one.
  if (index < kMostDevices && !writing.test_and_set(std::memory_order_acquire)) {
    if (!asked[index].load(std::memory_order_relaxed)) {
      known[index] = *device;
      asked[index].store(true, std::memory_order_release);
    }
    writing.clear(std::memory_order_release);
  }
  return true;
}

rmsnorm_status run_on_cuda(const rmsnorm_args& args, void* stream, Tactic tactic) {
  const rmsnorm_status checked = rmsnorm_check(&args);
  if (checked != RMSNORM_OK) return checked;
  if (args.x_dtype == RMSNORM_F64) return RMSNORM_UNSUPPORTED;
  if (args.rows == 0 || args.width == 0) return RMSNORM_OK;
  Device device{};
  if (!current_device(&device)) return refused(cudaErrorUnknown);

  const Problem problem = problem_of(args);
  const Launch launch = choose_launch(problem, device, tactic);
  const Steps steps = steps_of(args, problem, launch);
  rmsnorm_status status = RMSNORM_OK;
  for (int i = 0; i < steps.count && status == RMSNORM_OK; ++i) {
    status = queue(steps.step[i], launch, device, static_cast<cudaStream_t>(stream));
  }
  return status;
}

}  // namespace rmsnorm

extern "C" rmsnorm_status rmsnorm_cuda(const rmsnorm_args* args, void* stream) {
  if (args == nullptr) return RMSNORM_BAD_ARGUMENT;
  return rmsnorm::run_on_cuda(*args, stream, rmsnorm::Tactic::kTable);
}
