#include "norm_call.h"

namespace rmsnorm {
namespace {

int bytes_of(int32_t dtype) { return dtype == RMSNORM_F32 ? 4 : 2; }

bool sixteen(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool rows_aligned(const void* pointer, int64_t stride, int64_t rows, int32_t dtype) {
  return pointer == nullptr || (sixteen(pointer) && (rows == 1 || stride * bytes_of(dtype) % 16 == 0));
}

bool parameter_aligned(const void* pointer, int64_t count) {
  return pointer == nullptr || count == 1 || sixteen(pointer);
}

bool all_aligned(const rmsnorm_args& args) {
  return args.width * bytes_of(args.x_dtype) % 16 == 0 &&
         rows_aligned(args.x, args.x_stride, args.rows, args.x_dtype) &&
         rows_aligned(args.skip, args.skip_stride, args.rows, args.x_dtype) &&
         rows_aligned(args.y, args.y_stride, args.rows, args.y_dtype) &&
         rows_aligned(args.sum, args.sum_stride, args.rows, args.x_dtype) &&
         parameter_aligned(args.scale, args.scale_count) && parameter_aligned(args.bias, args.bias_count);
}

bool may_split(const rmsnorm_args& args) {
  const int64_t wanted = split_workspace(args.width);
  return wanted > 0 && args.workspace != nullptr && args.workspace_bytes >= wanted &&
         reinterpret_cast<uintptr_t>(args.workspace) % 4 == 0 && (args.skip == nullptr || args.sum != nullptr);
}

int shift_of(int lanes) {
  int shift = 0;
  while ((1 << shift) < lanes) ++shift;
  return shift;
}

KernelChoice choice_of(const rmsnorm_args& args, const Problem& problem, Layout layout) {
  const bool has_params = args.scale != nullptr || args.bias != nullptr;
  return KernelChoice{layout,
                      problem.aligned,
                      has_params && args.param_dtype == RMSNORM_F32,
                      args.scale_order == RMSNORM_BEFORE_CAST,
                      args.bias != nullptr,
                      args.skip != nullptr,
                      false};
}

KernelArgs kernel_args_of(const rmsnorm_args& args, const Launch& launch) {
  const int x_bytes = bytes_of(args.x_dtype);
  KernelArgs out{};
  out.x = static_cast<const char*>(args.x);
  out.skip = static_cast<const char*>(args.skip);
  out.scale = static_cast<const char*>(args.scale);
  out.bias = static_cast<const char*>(args.bias);
  out.y = static_cast<char*>(args.y);
  out.sum = static_cast<char*>(args.sum);
  out.x_step = args.x_stride * x_bytes;
  out.skip_step = args.skip_stride * x_bytes;
  out.y_step = args.y_stride * bytes_of(args.y_dtype);
  out.sum_step = args.sum_stride * x_bytes;
  out.rows = args.rows;
  out.width = args.width;
  out.reciprocal_width = static_cast<float>(1.0 / static_cast<double>(args.width));
  out.eps = static_cast<float>(args.eps);
  out.eps_mode = static_cast<EpsMode>(args.eps_mode);
  out.scale_is_one_element = args.scale != nullptr && args.scale_count == 1 ? 1 : 0;
  out.bias_is_one_element = args.bias != nullptr && args.bias_count == 1 ? 1 : 0;
  // Inside the root even the least eps gives a normal number.
  out.eps_is_tiny = args.eps_mode != RMSNORM_EPS_INSIDE && out.eps > 0.0F && out.eps < 0x1p-126F ? 1 : 0;
  out.lanes = launch.lanes;
  out.lane_shift = launch.lanes <= 32 ? shift_of(launch.lanes) : 31;
  out.cluster = launch.cluster;
  out.cluster_shift = shift_of(launch.cluster);
  out.kept = launch.kept;
  out.partials = static_cast<char*>(args.workspace);
  out.slices = launch.slices;
  out.slice_vectors = launch.slice_vectors;
  return out;
}

// Whether the sum takes the place of x or skip. Its phase then decides: what a thread reads there must be its own. (y
// may take the place of the other one, in whatever phase: a row's last load from it comes before its sum of squares,
// and the first store to it after that.)
bool sum_is_input(const rmsnorm_args& args) {
  return args.sum != nullptr && (args.sum == args.x || args.sum == args.skip);
}

KernelArgs anchored(KernelArgs args, const char* tensor, int64_t step, int32_t dtype) {
  args.anchor = tensor;
  args.anchor_step = step;
  args.anchor_shift = shift_of(bytes_of(dtype));
  return args;
}

KernelArgs anchored_at_x(const KernelArgs& all, const rmsnorm_args& args) {
  return anchored(all, all.x, all.x_step, args.x_dtype);
}

KernelArgs anchored_at_y(const KernelArgs& all, const rmsnorm_args& args) {
  return anchored(all, all.y, all.y_step, args.y_dtype);
}

KernelArgs anchored_at_sum(const KernelArgs& all, const rmsnorm_args& args) {
  return anchored(all, all.sum, all.sum_step, args.x_dtype);
}

Kernel select_kernel(int32_t x_dtype, const KernelChoice& choice) {
  switch (x_dtype) {
    case RMSNORM_F32:
      return select_f32(choice);
    case RMSNORM_F16:
      return select_f16(choice);
    case RMSNORM_BF16:
      return select_bf16(choice);
    default:
      return nullptr;
  }
}

}  // namespace

Problem problem_of(const rmsnorm_args& args) {
  return Problem{args.rows, args.width, bytes_of(args.x_dtype), all_aligned(args), may_split(args)};
}

Steps steps_of(const rmsnorm_args& args, const Problem& problem, const Launch& launch) {
  const KernelChoice choice = choice_of(args, problem, launch.layout);
  const KernelArgs all = kernel_args_of(args, launch);
  const Kernel kernel = select_kernel(args.x_dtype, choice);
  if (launch.slices == 0) {
    return Steps{1, {{kernel, sum_is_input(args) ? anchored_at_sum(all, args) : anchored_at_y(all, args)}, {}}};
  }
  KernelChoice first = choice;
  first.squares = true;
  KernelArgs finish = anchored_at_y(all, args);
  if (args.skip != nullptr) {
    finish.x = all.sum;
    finish.x_step = all.sum_step;
  }
  KernelArgs squares = args.skip != nullptr ? anchored_at_sum(all, args) : anchored_at_x(all, args);
  squares.scale = squares.bias = nullptr;  // it has no use for them, in whatever phase they are
  return Steps{2, {{select_kernel(args.x_dtype, first), squares}, {kernel, finish}}};
}

}  // namespace rmsnorm

extern "C" int64_t rmsnorm_cuda_workspace_bytes(const rmsnorm_args* args) {
  return args == nullptr ? 0 : rmsnorm::split_workspace(args->width);
}
