// The callbacks behind each custom op: types and shapes for the runtime's graph, attributes at load, rows at run time.
#include "ops.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "workspace.h"

namespace rmsnorm_ort {
namespace {

using ort::Status;

constexpr size_t kMostRank = 8;

const Op& op_of(const ort::CustomOp* base) { return *reinterpret_cast<const Op*>(base); }

ort::ElementType element_type(rmsnorm_dtype dtype) {
  switch (dtype) {
    case RMSNORM_F16:
      return ort::kFloat16;
    case RMSNORM_BF16:
      return ort::kBfloat16;
    case RMSNORM_F64:
      return ort::kDouble;
    default:
      return ort::kFloat;
  }
}

// ---- what the runtime asks when it reads the graph

const char* get_name(const ort::CustomOp* base) { return op_of(base).name; }
const char* get_provider(const ort::CustomOp* base) { return op_of(base).cuda.run ? "CUDAExecutionProvider" : nullptr; }

// X, then skip where there is one, then scale, then bias where there is one.
size_t scale_index(const Op& op) { return op.variant.skip ? 2 : 1; }
size_t input_count(const ort::CustomOp* base) { return scale_index(op_of(base)) + (op_of(base).variant.bias ? 2 : 1); }
size_t output_count(const ort::CustomOp* base) { return op_of(base).variant.skip ? 2 : 1; }
ort::ElementType input_type(const ort::CustomOp* base, size_t i) {
  const Op& op = op_of(base);
  return element_type(i < scale_index(op) ? op.x : op.param);
}
ort::ElementType output_type(const ort::CustomOp* base, size_t i) {
  return element_type(i == 0 ? op_of(base).y : op_of(base).x);
}
// A scale may be left out at the end of the list only: the runtime's shape inference crashes on a gap in front of a
// bias.
ort::Characteristic input_characteristic(const ort::CustomOp* base, size_t i) {
  return i == scale_index(op_of(base)) && !op_of(base).variant.bias ? ort::kOptional : ort::kRequired;
}
// Both of SkipRMSNorm's: the runtime's shape inference crashes when the shape of an output that a node left out is set.
ort::Characteristic output_characteristic(const ort::CustomOp*, size_t) { return ort::kRequired; }
int default_memory(const ort::CustomOp*, size_t) { return 0; }
int one(const ort::CustomOp*) { return 1; }
int newest_version(const ort::CustomOp*) { return 0x7fffffff; }

// Y may take X's memory. With skip, sum takes X's and Y skip's, since each element of both is read before it is
// written.
size_t pairs(int** inputs, int** outputs, size_t count, const int (*map)[2]) {
  *inputs = static_cast<int*>(malloc(count * sizeof(int)));
  *outputs = static_cast<int*>(malloc(count * sizeof(int)));
  if (!*inputs || !*outputs) return 0;
  for (size_t i = 0; i < count; i++) {
    (*inputs)[i] = map[i][0];
    (*outputs)[i] = map[i][1];
  }
  return count;
}
size_t inplace(int** inputs, int** outputs) {
  static const int map[][2] = {{0, 0}};
  return pairs(inputs, outputs, 1, map);
}
size_t skip_inplace(int** inputs, int** outputs) {
  static const int map[][2] = {{0, 1}, {1, 0}};
  return pairs(inputs, outputs, 2, map);
}
size_t no_alias(int** inputs, int** outputs) {
  *inputs = nullptr;
  *outputs = nullptr;
  return 0;
}
void release_pairs(int* inputs, int* outputs) {
  free(inputs);
  free(outputs);
}

// True where every dimension has a name or a value: the runtime would take a nameless unknown one for the value -1. A
// rank of 0 stands for an unknown rank.
bool shape_known(const ort::Api* api, const ort::TensorInfo* info) {
  size_t rank = 0;
  int64_t dims[kMostRank];
  const char* names[kMostRank];
  Status* failed = ort::DimensionsCount::call(api, info, &rank);
  if (!failed && (rank == 0 || rank > kMostRank)) return false;
  if (!failed) failed = ort::Dimensions::call(api, info, dims, rank);
  if (!failed) failed = ort::SymbolicDimensions::call(api, info, names, rank);
  if (failed) {
    ort::ReleaseStatus::call(api, failed);
    return false;
  }
  for (size_t i = 0; i < rank; i++) {
    if (dims[i] < 0 && (!names[i] || !*names[i])) return false;
  }
  return true;
}

// The dtype of Y: this callback is shared by all ops of a name, whatever their dtypes.
Status* y_type(const Op& op, ort::ShapeContext* context, const ort::TensorInfo* x, ort::ElementType* type) {
  size_t count = 0;
  ort::TensorInfo* scale = nullptr;
  Status* failed = ort::ShapeInputCount::call(op.api, context, &count);
  const bool params = op.variant.scale_order == RMSNORM_AFTER_CAST && count > scale_index(op);
  if (!failed && params) failed = ort::ShapeInput::call(op.api, context, scale_index(op), &scale);
  if (!failed) failed = ort::GetElementType::call(op.api, scale ? scale : x, type);
  return failed;
}

// Both outputs have X's shape, and sum its dtype. Leaving it out is always allowed, so nothing that fails here is an
// error: the runtime has set the dtypes already, and only needs them said again with the shape.
Status* infer_shape(const ort::CustomOp* base, ort::ShapeContext* context) {
  const Op& op = op_of(base);
  ort::TensorInfo* info = nullptr;  // the context's own
  ort::ElementType type = op.base.output_type(base, 0);
  Status* failed = ort::ShapeInput::call(op.api, context, 0, &info);
  if (!failed && info && shape_known(op.api, info)) {
    if (op.variant.skip) failed = ort::ShapeOutput::call(op.api, context, 1, info);
    if (!failed) failed = y_type(op, context, info, &type);
    if (!failed) failed = ort::SetElementType::call(op.api, info, type);
    if (!failed) failed = ort::ShapeOutput::call(op.api, context, 0, info);
  }
  if (failed) ort::ReleaseStatus::call(op.api, failed);
  return nullptr;
}

// ---- one node

struct Kernel {
  Kernel(const Op& of, ort::Allocator* allocator) : op(&of), workspace(of.api, allocator) {}

  const Op* op;
  Workspace workspace;
  double eps;
  int64_t scale_count;  // of a constant scale; -1 where it may change
  int64_t axis;
  rmsnorm_eps_mode eps_mode;
  rmsnorm_scale_order scale_order;
  rmsnorm_stash stash;
};

Status* fail(const ort::Api* api, ort::ErrorCode code, const char* name, const char* what) {
  char message[256];
  snprintf(message, sizeof message, "rmsnorm_deploy %s: %s", name, what);
  return ort::CreateStatus::call(api, code, message);
}

int64_t count_elements(const ort::Api* api, const ort::Value* value, Status** failed) {
  ort::TensorInfo* info = nullptr;
  size_t count = 0;
  *failed = ort::TypeAndShape::call(api, value, &info);
  if (*failed) return -1;
  *failed = ort::ElementCount::call(api, info, &count);
  ort::ReleaseTensorInfo::call(api, info);
  return static_cast<int64_t>(count);
}

// How many elements the scale has, where it is a constant of the graph; else -1.
int64_t constant_scale_count(const Op& op, const ort::KernelInfo* info) {
  int constant = 0;
  const ort::Value* value = nullptr;
  int64_t count = -1;
  Status* failed = ort::ConstantInput::call(op.api, info, scale_index(op), &constant, &value);
  if (!failed && constant && value) count = count_elements(op.api, value, &failed);
  if (failed) ort::ReleaseStatus::call(op.api, failed);
  return count;
}

// A missing attribute leaves its default.
void read_float(const ort::Api* api, const ort::KernelInfo* info, const char* name, float* value) {
  Status* missing = ort::AttributeFloat::call(api, info, name, value);
  if (missing) ort::ReleaseStatus::call(api, missing);
}

void read_int(const ort::Api* api, const ort::KernelInfo* info, const char* name, int64_t* value) {
  Status* missing = ort::AttributeInt::call(api, info, name, value);
  if (missing) ort::ReleaseStatus::call(api, missing);
}

// The place of the attribute's value among options, -1 where it is none of them, missing_value where there is none.
int read_option(const ort::Api* api, const ort::KernelInfo* info, const char* name, const char* const* options,
                int count, int missing_value) {
  char value[32] = "";
  size_t size = 0;
  Status* missing = ort::AttributeString::call(api, info, name, nullptr, &size);
  if (missing) {
    ort::ReleaseStatus::call(api, missing);
    return missing_value;
  }
  if (size > sizeof value) return -1;
  size = sizeof value;
  Status* failed = ort::AttributeString::call(api, info, name, value, &size);
  if (failed) {
    ort::ReleaseStatus::call(api, failed);
    return -1;
  }
  for (int i = 0; i < count; i++) {
    if (strcmp(value, options[i]) == 0) return i;
  }
  return -1;
}

// nullptr where the op needs none, or the runtime has none to give.
ort::Allocator* device_allocator(const Op& op, const ort::KernelInfo* info) {
  ort::Allocator* allocator = nullptr;
  if (!op.cuda.run || op.minor < ort::kKernelAllocator) return nullptr;
  Status* failed = ort::KernelAllocator::call(op.api, info, 0, &allocator);
  if (failed) ort::ReleaseStatus::call(op.api, failed);
  return failed ? nullptr : allocator;
}

Status* create_kernel(const ort::CustomOp* base, const ort::Api*, const ort::KernelInfo* info, void** out) {
  static const char* const kEpsModes[] = {"inside", "outside", "clamp"};
  static const char* const kScaleOrders[] = {"after_cast", "before_cast"};
  const Op& op = op_of(base);
  const ort::Api* api = op.api;
  *out = nullptr;

  float epsilon = 1e-6f;
  float epsilon_low = 0;
  int64_t axis = -1;
  int64_t stash = ort::kFloat;
  read_float(api, info, "epsilon", &epsilon);
  read_float(api, info, "epsilon_low", &epsilon_low);
  read_int(api, info, "axis", &axis);
  read_int(api, info, "stash_type", &stash);
  const int eps_mode = read_option(api, info, "epsilon_mode", kEpsModes, 3, RMSNORM_EPS_INSIDE);
  const int scale_order = read_option(api, info, "scale_order", kScaleOrders, 2, RMSNORM_AFTER_CAST);

  const double eps = static_cast<double>(epsilon) + static_cast<double>(epsilon_low);
  const ort::ErrorCode bad = ort::kInvalidArgument;
  if (!(eps >= 0)) return fail(api, bad, op.name, "epsilon must not be negative");
  if (axis >= 0) return fail(api, bad, op.name, "axis must be negative: it is counted from the end");
  if (eps_mode < 0) return fail(api, bad, op.name, "epsilon_mode must be \"inside\", \"outside\" or \"clamp\"");
  if (scale_order < 0) return fail(api, bad, op.name, "scale_order must be \"after_cast\" or \"before_cast\"");
  if (stash != ort::kFloat && !(stash == ort::kDouble && op.x == RMSNORM_F64))
    return fail(api, bad, op.name, "stash_type must be 1 (FLOAT), or 11 (DOUBLE) for a double X");
  // The name decided the output's type when the graph was read.
  if (op.x != op.param && scale_order != op.variant.scale_order)
    return fail(api, bad, op.name, "scale_order contradicts the op's name");

  Kernel* kernel = new (std::nothrow) Kernel(op, device_allocator(op, info));
  if (!kernel) return fail(api, ort::kFail, op.name, "out of memory");
  kernel->eps = eps;
  kernel->scale_count = constant_scale_count(op, info);
  kernel->axis = axis;
  kernel->eps_mode = static_cast<rmsnorm_eps_mode>(eps_mode);
  kernel->scale_order = static_cast<rmsnorm_scale_order>(scale_order);
  kernel->stash = stash == ort::kDouble ? RMSNORM_STASH_F64 : RMSNORM_STASH_F32;
  *out = kernel;
  return nullptr;
}

void destroy_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

// ---- one run

// Calls in a row, of which the first that fails stops the others.
struct Run {
  const ort::Api* api;
  ort::KernelContext* context;
  bool by_reference;  // api has ort::ShapeReference
  Status* failed = nullptr;

  bool ok(Status* status) {
    failed = status;
    return status == nullptr;
  }

  // nullptr where an optional input is absent, or on failure.
  const ort::Value* input(size_t i) {
    const ort::Value* value = nullptr;
    return ok(ort::Input::call(api, context, i, &value)) ? value : nullptr;
  }

  ort::Value* output(size_t i, const int64_t* dims, size_t rank) {
    ort::Value* value = nullptr;
    return ok(ort::Output::call(api, context, i, dims, rank, &value)) ? value : nullptr;
  }

  void* data(const ort::Value* value) {
    void* pointer = nullptr;
    return value && ok(ort::MutableData::call(api, value, &pointer)) ? pointer : nullptr;
  }

  // The rank, or 0 where it is not between 1 and kMostRank.
  size_t shape(const ort::Value* value, int64_t* dims) {
    return by_reference ? shape_by_reference(value, dims) : shape_by_copy(value, dims);
  }

  size_t shape_by_reference(const ort::Value* value, int64_t* dims) {
    ort::ElementType type;
    const int64_t* data = nullptr;
    size_t rank = 0;
    if (!ok(ort::ShapeReference::call(api, value, &type, &data, &rank)) || !data || rank > kMostRank) return 0;
    memcpy(dims, data, rank * sizeof *dims);
    return rank;
  }

  size_t shape_by_copy(const ort::Value* value, int64_t* dims) {
    ort::TensorInfo* info = nullptr;
    size_t rank = 0;
    if (!ok(ort::TypeAndShape::call(api, value, &info))) return 0;
    if (ok(ort::DimensionsCount::call(api, info, &rank)) && rank >= 1 && rank <= kMostRank)
      ok(ort::Dimensions::call(api, info, dims, rank));
    ort::ReleaseTensorInfo::call(api, info);
    return rank <= kMostRank ? rank : 0;
  }

  int64_t elements(const ort::Value* value) { return count_elements(api, value, &failed); }
};

// ONNX Runtime's own threads, for rmsnorm_cpu.
void parallel_for(void* pool, rmsnorm_task task, void* arg, size_t count) {
  Run& run = *static_cast<Run*>(pool);
  run.ok(ort::ParallelFor::call(run.api, run.context, task, count, 0, arg));
}

Status* execute(Kernel& kernel, Run& run, rmsnorm_args args) {
  const Op& op = *kernel.op;
  rmsnorm_status status = RMSNORM_OK;
  if (op.cuda.run) {
    void* stream = nullptr;
    if (!run.ok(ort::GpuStream::call(run.api, run.context, &stream))) return run.failed;
    args.workspace_bytes = op.cuda.workspace_bytes(&args);
    args.workspace = kernel.workspace.on(stream, static_cast<size_t>(args.workspace_bytes));
    status = op.cuda.run(&args, stream);
  } else {
    const rmsnorm_parallel parallel = {parallel_for, &run, 0};
    status = rmsnorm_cpu(&args, &parallel);
  }
  if (run.failed) return run.failed;
  return status == RMSNORM_OK ? nullptr : fail(run.api, ort::kFail, op.name, rmsnorm_status_string(status));
}

Status* compute(void* state, ort::KernelContext* context) {
  Kernel& kernel = *static_cast<Kernel*>(state);
  const Op& op = *kernel.op;
  Run run = {op.api, context, op.minor >= ort::kShapeReference};
  rmsnorm_args args = {};
  args.abi = RMSNORM_ABI;
  args.x_dtype = op.x;
  args.param_dtype = op.param;
  args.y_dtype = op.y;
  args.eps_mode = kernel.eps_mode;
  args.scale_order = kernel.scale_order;
  args.stash = kernel.stash;
  args.eps = kernel.eps;

  const ort::Value* x = run.input(0);
  if (!x) return run.failed ? run.failed : fail(op.api, ort::kInvalidArgument, op.name, "X is missing");
  int64_t dims[kMostRank];
  const size_t rank = run.shape(x, dims);
  if (run.failed) return run.failed;
  if (rank == 0 || static_cast<int64_t>(rank) + kernel.axis < 0)
    return fail(op.api, ort::kInvalidArgument, op.name, "X must have a rank from 1 to 8, and no less than -axis");
  args.rows = 1;
  args.width = 1;
  for (size_t i = 0; i < rank; i++) {
    int64_t& size = static_cast<int64_t>(i) < static_cast<int64_t>(rank) + kernel.axis ? args.rows : args.width;
    size *= dims[i];
  }
  args.x_stride = args.skip_stride = args.y_stride = args.sum_stride = args.width;
  args.x = run.data(x);

  const size_t at = scale_index(op);
  if (op.variant.skip && !run.failed) {
    const ort::Value* skip = run.input(1);
    int64_t skip_dims[kMostRank];
    const size_t skip_rank = skip ? run.shape(skip, skip_dims) : 0;
    if (run.failed) return run.failed;
    if (skip_rank != rank || memcmp(dims, skip_dims, rank * sizeof(int64_t)) != 0)
      return fail(op.api, ort::kInvalidArgument, op.name, "X and skip must have the same shape");
    args.skip = run.data(skip);
  }
  const ort::Value* scale = run.failed ? nullptr : run.input(at);
  if (scale) {
    args.scale_count = kernel.scale_count >= 0 ? kernel.scale_count : run.elements(scale);
    args.scale = run.failed ? nullptr : run.data(scale);
  }
  const ort::Value* bias = op.variant.bias && !run.failed ? run.input(at + 1) : nullptr;
  if (bias) {
    args.bias_count = run.elements(bias);
    args.bias = run.failed ? nullptr : run.data(bias);
  }
  if (run.failed) return run.failed;
  if ((scale && args.scale_count != 1 && args.scale_count != args.width) ||
      (bias && args.bias_count != 1 && args.bias_count != args.width))
    return fail(op.api, ort::kInvalidArgument, op.name,
                "scale and bias must hold one element, or one for each of a row");

  args.y = run.data(run.output(0, dims, rank));
  if (op.variant.skip && !run.failed) args.sum = run.data(run.output(1, dims, rank));
  if (run.failed) return run.failed;
  return execute(kernel, run, args);
}

// ---- the table

struct Types {
  rmsnorm_dtype x;
  rmsnorm_dtype param;
};

// Equal dtypes first: where a node has no scale, the runtime takes the first op that fits.
constexpr Types kTypes[] = {{RMSNORM_F32, RMSNORM_F32}, {RMSNORM_F16, RMSNORM_F16}, {RMSNORM_BF16, RMSNORM_BF16},
                            {RMSNORM_F64, RMSNORM_F64}, {RMSNORM_F16, RMSNORM_F32}, {RMSNORM_BF16, RMSNORM_F32}};

ort::CustomOp callbacks(const Variant& v, uint32_t minor) {
  ort::CustomOp op = {};
  op.version = minor < ort::kNewest ? minor : ort::kNewest;
  op.name = get_name;
  op.provider = get_provider;
  op.input_type = input_type;
  op.input_count = input_count;
  op.output_type = output_type;
  op.output_count = output_count;
  op.destroy = destroy_kernel;
  op.input_characteristic = input_characteristic;
  op.output_characteristic = output_characteristic;
  op.input_memory_type = default_memory;
  op.variadic_input_min_arity = one;
  op.variadic_input_homogeneity = one;
  op.variadic_output_min_arity = one;
  op.variadic_output_homogeneity = one;
  op.create_kernel_v2 = create_kernel;
  op.compute_v2 = compute;
  op.infer_shape = infer_shape;
  op.start_version = one;
  op.end_version = newest_version;
  op.may_inplace = v.skip ? skip_inplace : inplace;
  op.release_may_inplace = release_pairs;
  op.alias_map = no_alias;
  op.release_alias_map = release_pairs;
  return op;
}

Op make_op(const Variant& v, const Types& types, const ort::Api* api, uint32_t minor, const Cuda& cuda) {
  Op op = {callbacks(v, minor), api, minor, cuda, v, types.x, types.param, types.x, ""};
  if (v.scale_order == RMSNORM_AFTER_CAST) op.y = types.param;
  write_name(v, op.name);
  return op;
}

}  // namespace

int make_ops(Op* ops, const ort::Api* api, uint32_t minor, const Cuda& cuda) {
  int count = 0;
  for (int i = 0; i < kVariants; i++) {
    const Variant v = variant(i);
    for (const Types& types : kTypes) {
      if (v.stash == RMSNORM_STASH_F64 && types.x != RMSNORM_F64) continue;
      ops[count++] = make_op(v, types, api, minor, Cuda{});
      if (cuda.run && types.x != RMSNORM_F64) ops[count++] = make_op(v, types, api, minor, cuda);
    }
  }
  return count;
}

}  // namespace rmsnorm_ort
