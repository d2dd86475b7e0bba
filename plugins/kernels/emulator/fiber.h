// Fibers: functions that give way to each other at a point of their choosing, on stacks of their own.
#pragma once

#include <stddef.h>

#include <memory>
#include <vector>

namespace rmsnorm::emulator {

// `count` fibers over one body. One object serves many runs and keeps the stacks between them.
class Fibers {
 public:
  Fibers();
  ~Fibers();
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  using Body = void (*)(void* context, int index);

  // Makes fibers 0 .. count-1, none of which has started.
  void prepare(int count, Body body, void* context);
  // Runs one until it gives way or ends.
  void resume(int index);
  // Called by the running fiber.
  void give_way();
  bool ended(int index) const;
  int running() const { return running_; }

 private:
  struct Fiber;
  static void enter();
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Body body_ = nullptr;
  void* context_ = nullptr;
  void* scheduler_ = nullptr;
  int running_ = -1;
};

}  // namespace rmsnorm::emulator
