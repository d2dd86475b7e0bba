#include "fiber.h"

#include <stdint.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace rmsnorm::emulator {
namespace {

constexpr size_t kStackBytes = 32 * 1024;
thread_local Fibers* current = nullptr;

}  // namespace

#if defined(__x86_64__)

// Saves the registers that a call must preserve on the running stack, stores its top in *from and goes on at `to`.
extern "C" void rmsnorm_switch_stack(void** from, void* to);
__asm__(
    ".text\n"
    ".type rmsnorm_switch_stack, @function\n"
    "rmsnorm_switch_stack:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size rmsnorm_switch_stack, .-rmsnorm_switch_stack\n");

struct Fibers::Fiber {
  std::unique_ptr<char[]> stack = std::unique_ptr<char[]>(new char[kStackBytes]);
  void* top = nullptr;
  bool ended = false;

  void start(void (*entry)()) {
    auto* word =
        reinterpret_cast<uintptr_t*>((reinterpret_cast<uintptr_t>(stack.get()) + kStackBytes) & ~uintptr_t{15});
    *--word = 0;  // where `entry` would return to, which also aligns the stack as a call does
    *--word = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) *--word = 0;
    top = word;
    ended = false;
  }
};

Fibers::Fibers() = default;
Fibers::~Fibers() = default;

void Fibers::resume(int index) {
  running_ = index;
  current = this;
  rmsnorm_switch_stack(&scheduler_, fibers_[static_cast<size_t>(index)]->top);
  running_ = -1;
}

void Fibers::give_way() { rmsnorm_switch_stack(&fibers_[static_cast<size_t>(running_)]->top, scheduler_); }

#else

struct Fibers::Fiber {
  std::unique_ptr<char[]> stack = std::unique_ptr<char[]>(new char[kStackBytes]);
  ucontext_t context;
  bool ended = false;

  void start(void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
    ended = false;
  }
};

Fibers::Fibers() : scheduler_(new ucontext_t) {}
Fibers::~Fibers() { delete static_cast<ucontext_t*>(scheduler_); }

void Fibers::resume(int index) {
  running_ = index;
  current = this;
  swapcontext(static_cast<ucontext_t*>(scheduler_), &fibers_[static_cast<size_t>(index)]->context);
  running_ = -1;
}

void Fibers::give_way() {
  swapcontext(&fibers_[static_cast<size_t>(running_)]->context, static_cast<ucontext_t*>(scheduler_));
}

#endif

void Fibers::enter() {
  Fibers* const self = current;
  const int index = self->running_;
  self->body_(self->context_, index);
  self->fibers_[static_cast<size_t>(index)]->ended = true;
  for (;;) self->give_way();
}

void Fibers::prepare(int count, Body body, void* context) {
  body_ = body;
  context_ = context;
  while (fibers_.size() < static_cast<size_t>(count)) fibers_.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < count; ++i) fibers_[static_cast<size_t>(i)]->start(&Fibers::enter);
}

bool Fibers::ended(int index) const { return fibers_[static_cast<size_t>(index)]->ended; }

}  // namespace rmsnorm::emulator
