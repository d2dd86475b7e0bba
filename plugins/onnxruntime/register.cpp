// RegisterCustomOps: what ONNX Runtime calls when the library is handed to its session options.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mutex>

#include "ops.h"

namespace {

using ort::Api;
using ort::Status;

// The y of a runtime that calls itself "1.y.z", and more than any y for a later major version; 0 where it is neither.
unsigned long minor_version(const char* text) {
  char* end = nullptr;
  const unsigned long major = text ? strtoul(text, &end, 10) : 0;
  if (major == 0 || *end != '.') return 0;
  return major > 1 ? 1000 : strtoul(end + 1, nullptr, 10);
}

Status* too_old(const ort::ApiBase* base) {
  const Api* api = base->get_api(1);
  if (!api) return nullptr;
  char message[160];
  const char* version = base->get_version();
  snprintf(message, sizeof message, "rmsnorm_deploy needs ONNX Runtime 1.%u or newer, and this is %s", ort::kOldest,
           version ? version : "of no known version");
  return ort::CreateStatus::call(api, ort::kNotImplemented, message);
}

rmsnorm_ort::Cuda cuda_of(void* library) {
  rmsnorm_ort::Cuda cuda = {};
  cuda.run = reinterpret_cast<decltype(cuda.run)>(dlsym(library, "rmsnorm_cuda"));
  cuda.workspace_bytes =
      reinterpret_cast<decltype(cuda.workspace_bytes)>(dlsym(library, "rmsnorm_cuda_workspace_bytes"));
  return cuda.run && cuda.workspace_bytes ? cuda : rmsnorm_ort::Cuda{};
}

// Those of a library that the process has loaded already, or that lies beside this one.
rmsnorm_ort::Cuda find_cuda() {
  rmsnorm_ort::Cuda cuda = cuda_of(RTLD_DEFAULT);
  Dl_info self;
  if (!cuda.run && dladdr(reinterpret_cast<const void*>(&find_cuda), &self) && self.dli_fname) {
    char path[4096];
    const char* slash = strrchr(self.dli_fname, '/');
    const int folder = slash ? static_cast<int>(slash - self.dli_fname) : 1;
    const int length =
        snprintf(path, sizeof path, "%.*s/librmsnorm_deploy_cuda.so", folder, slash ? self.dli_fname : ".");
    void* library = length < static_cast<int>(sizeof path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (library) cuda = cuda_of(library);
  }
  return cuda;
}

// A runtime that the process has loaded, and the domain made for it. Sessions refer to both for as long as they live,
// which is not known here: they are never freed.
struct Registered {
  const Api* api;
  ort::Domain* domain;
  rmsnorm_ort::Op ops[rmsnorm_ort::kMostOps];
};

constexpr int kMostRuntimes = 8;

Status* make_domain(const Api* api, uint32_t minor, Registered* out) {
  out->api = api;
  const int count = rmsnorm_ort::make_ops(out->ops, api, minor, find_cuda());
  Status* failed = ort::CreateDomain::call(api, "rmsnorm_deploy", &out->domain);
  for (int i = 0; i < count && !failed; i++) failed = ort::DomainAdd::call(api, out->domain, &out->ops[i].base);
  return failed;
}

Status* register_ops(ort::SessionOptions* options, const Api* api, uint32_t minor) {
  static std::mutex mutex;
  static Registered* made[kMostRuntimes];
  const std::lock_guard<std::mutex> lock(mutex);
  for (Registered*& slot : made) {
    if (slot && slot->api != api) continue;
    if (!slot) {
      Registered* fresh = static_cast<Registered*>(calloc(1, sizeof(Registered)));
      if (!fresh) return ort::CreateStatus::call(api, ort::kFail, "rmsnorm_deploy: out of memory");
      Status* failed = make_domain(api, minor, fresh);
      if (failed) return failed;  // what the runtime may already refer to stays allocated
      slot = fresh;
    }
    return ort::AddDomain::call(api, options, slot->domain);
  }
  return ort::CreateStatus::call(api, ort::kFail, "rmsnorm_deploy: too many ONNX Runtimes in one process");
}

}  // namespace

extern "C" RMSNORM_API Status* RegisterCustomOps(ort::SessionOptions* options, const ort::ApiBase* base) {
  if (!options || !base) return nullptr;
  const unsigned long minor = minor_version(base->get_version());
  if (minor < ort::kOldest) return too_old(base);
  // The same table for every version; asking for the newest that is used here makes sure that it is there.
  const Api* api = base->get_api(minor < ort::kShapeReference ? ort::kOldest : ort::kShapeReference);
  if (!api) return too_old(base);
  return register_ops(options, api, static_cast<uint32_t>(minor));
}
