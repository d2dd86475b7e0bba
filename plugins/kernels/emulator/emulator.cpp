#include "emulator.h"

#include <cstdio>
#include <cstring>

#include "../cuda/norm_call.h"
#include "machine.h"

namespace {

void describe(const rmsnorm::Launch& launch, rmsnorm_emulated_report* report) {
  report->layout = static_cast<int32_t>(launch.layout);
  report->threads = launch.threads;
  report->lanes = launch.lanes;
  report->cluster = launch.cluster;
  report->kept = launch.kept;
  report->shared_bytes = launch.shared_bytes;
  report->blocks = launch.blocks;
  report->slices = launch.slices;
  std::snprintf(report->reason, sizeof(report->reason), "%s", launch.reason);
}

}  // namespace

extern "C" rmsnorm_status rmsnorm_emulate(const rmsnorm_args* args, const rmsnorm_emulated_device* device,
                                          const rmsnorm_emulated_buffer* buffers, int32_t buffer_count,
                                          rmsnorm_emulated_report* report) {
  std::memset(report, 0, sizeof(*report));
  const rmsnorm_status checked = rmsnorm_check(args);
  if (checked != RMSNORM_OK) return checked;
  if (args->x_dtype == RMSNORM_F64) return RMSNORM_UNSUPPORTED;
  if (args->rows == 0 || args->width == 0) return RMSNORM_OK;
  const rmsnorm::Device emulated{device->compute, device->multiprocessors, device->shared_bytes};
  const rmsnorm::Problem problem = rmsnorm::problem_of(*args);
  const auto tactic = static_cast<rmsnorm::Tactic>(device->tactic);
  const rmsnorm::Launch launch = rmsnorm::choose_launch(problem, emulated, tactic);
  describe(launch, report);
  report->tactic_applies = rmsnorm::tactic_applies(problem, emulated, tactic) ? 1 : 0;
  if (buffers == nullptr) return RMSNORM_OK;
  rmsnorm::emulator::Machine machine(buffers, buffer_count, report);
  const rmsnorm::Steps steps = rmsnorm::steps_of(*args, problem, launch);
  for (int i = 0; i < steps.count; ++i) {
    machine.run(steps.step[i].kernel, steps.step[i].args, launch.blocks, launch.threads, launch.cluster,
                launch.shared_bytes);
  }
  return RMSNORM_OK;
}
