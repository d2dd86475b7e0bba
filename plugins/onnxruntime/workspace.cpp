#include "workspace.h"

#include <new>

namespace rmsnorm_ort {

Workspace::~Workspace() {
  for (const Block& block : blocks_) {
    ort::Status* failed = ort::Free::call(api_, allocator_, block.memory);
    if (failed) ort::ReleaseStatus::call(api_, failed);
  }
  if (allocator_) ort::ReleaseAllocator::call(api_, allocator_);
}

void* Workspace::on(const void* stream, size_t bytes) noexcept {
  if (!allocator_ || bytes == 0) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Block& block : blocks_) {
    if (block.stream == stream && block.bytes >= bytes) return block.memory;
  }
  try {
    blocks_.reserve(blocks_.size() + 1);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
  void* memory = nullptr;
  ort::Status* failed = ort::Allocate::call(api_, allocator_, bytes, &memory);
  if (failed) ort::ReleaseStatus::call(api_, failed);
  if (!failed && memory) blocks_.push_back({stream, bytes, memory});
  return memory;
}

}  // namespace rmsnorm_ort
