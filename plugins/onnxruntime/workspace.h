// Device memory that rmsnorm_cuda asks for, from the session's own allocator.
#ifndef RMSNORM_DEPLOY_ORT_WORKSPACE_H_
#define RMSNORM_DEPLOY_ORT_WORKSPACE_H_

#include <mutex>
#include <vector>

#include "ort_abi.h"

namespace rmsnorm_ort {

// Of one node. Runs of a session go on at once, each on a stream of its own: a block serves one stream and stays, since
// memory that went back to the allocator after a launch could be another stream's before the kernel has run. It is
// there before a CUDA graph is captured, which ONNX Runtime does after running the model.
class Workspace {
 public:
  // Without an allocator (ONNX Runtime before 1.18 gives none to custom ops) there is no memory, and no error.
  Workspace(const ort::Api* api, ort::Allocator* allocator) : api_(api), allocator_(allocator) {}
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // nullptr where there is none to be had: the kernels then do without.
  void* on(const void* stream, size_t bytes) noexcept;

 private:
  struct Block {
    const void* stream;
    size_t bytes;
    void* memory;
  };
  const ort::Api* api_;
  ort::Allocator* allocator_;
  std::mutex mutex_;
  std::vector<Block> blocks_;
};

}  // namespace rmsnorm_ort

#endif  // RMSNORM_DEPLOY_ORT_WORKSPACE_H_
