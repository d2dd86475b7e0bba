// The part of ONNX Runtime's C ABI that a custom-op library needs, declared here so that one binary is built without
// its headers and runs on every release from 1.17 on. The OrtApi is a table of function pointers that only ever grows
// at its end, and so is OrtCustomOp; each number below is a function's place in that table.
#ifndef RMSNORM_DEPLOY_ORT_ABI_H_
#define RMSNORM_DEPLOY_ORT_ABI_H_

#include <stddef.h>
#include <stdint.h>

namespace ort {

struct Api;     // the table
struct Status;  // nullptr is success
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct Value;
struct TensorInfo;
struct Allocator;

struct ApiBase {
  const Api* (*get_api)(uint32_t version) noexcept;
  const char* (*get_version)() noexcept;
};

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2, kNotImplemented = 9 };
enum ElementType : int { kFloat = 1, kFloat16 = 10, kDouble = 11, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };

// In full for version 18: the runtime reads what op.version promises. Members that are never called may be null.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  ElementType (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  ElementType (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, KernelContext*);
  void (*destroy)(void*);
  Characteristic (*input_characteristic)(const CustomOp*, size_t);
  Characteristic (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory_type)(const CustomOp*, size_t);
  int (*variadic_input_min_arity)(const CustomOp*);
  int (*variadic_input_homogeneity)(const CustomOp*);
  int (*variadic_output_min_arity)(const CustomOp*);
  int (*variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*compute_v2)(void*, KernelContext*);
  Status* (*infer_shape)(const CustomOp*, ShapeContext*);  // from 17
  int (*start_version)(const CustomOp*);                   // from 17
  int (*end_version)(const CustomOp*);
  size_t (*may_inplace)(int** inputs, int** outputs);  // from 18
  void (*release_may_inplace)(int* inputs, int* outputs);
  size_t (*alias_map)(int** inputs, int** outputs);
  void (*release_alias_map)(int* inputs, int* outputs);
};

template <int kSlot, class R, class... Args>
struct Function {
  static R call(const Api* api, Args... args) { return reinterpret_cast<R (*const*)(Args...)>(api)[kSlot](args...); }
};

using CreateStatus = Function<0, Status*, ErrorCode, const char*>;
using CreateDomain = Function<26, Status*, const char*, Domain**>;
using DomainAdd = Function<27, Status*, Domain*, const CustomOp*>;
using AddDomain = Function<28, Status*, SessionOptions*, Domain*>;
using MutableData = Function<51, Status*, const Value*, void**>;
using SetElementType = Function<58, Status*, TensorInfo*, ElementType>;
using GetElementType = Function<60, Status*, const TensorInfo*, ElementType*>;
using DimensionsCount = Function<61, Status*, const TensorInfo*, size_t*>;
using Dimensions = Function<62, Status*, const TensorInfo*, int64_t*, size_t>;
using SymbolicDimensions = Function<63, Status*, const TensorInfo*, const char**, size_t>;
using ElementCount = Function<64, Status*, const TensorInfo*, size_t*>;
using TypeAndShape = Function<65, Status*, const Value*, TensorInfo**>;
using Allocate = Function<75, Status*, Allocator*, size_t, void**>;
using Free = Function<76, Status*, Allocator*, void*>;
using AttributeFloat = Function<85, Status*, const KernelInfo*, const char*, float*>;
using AttributeInt = Function<86, Status*, const KernelInfo*, const char*, int64_t*>;
using AttributeString = Function<87, Status*, const KernelInfo*, const char*, char*, size_t*>;
using Input = Function<90, Status*, const KernelContext*, size_t, const Value**>;
using Output = Function<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**>;
using ReleaseStatus = Function<93, void, Status*>;
using ReleaseTensorInfo = Function<99, void, TensorInfo*>;
using ReleaseAllocator = Function<132, void, Allocator*>;
using GpuStream = Function<193, Status*, const KernelContext*, void**>;
using ConstantInput = Function<249, Status*, const KernelInfo*, size_t, int*, const Value**>;
using ShapeInputCount = Function<267, Status*, const ShapeContext*, size_t*>;
using ShapeInput = Function<268, Status*, const ShapeContext*, size_t, TensorInfo**>;
using ShapeOutput = Function<270, Status*, const ShapeContext*, size_t, const TensorInfo*>;
using ParallelFor = Function<274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>;

// From 18: the provider's allocator; 0 is its default memory.
using KernelAllocator = Function<278, Status*, const KernelInfo*, int, Allocator**>;

// From 24: the shape where the runtime keeps it, while TypeAndShape copies it into several allocations.
using ShapeReference = Function<414, Status*, const Value*, ElementType*, const int64_t**, size_t*>;

// The oldest and newest versions of CustomOp that this library can be. The API table of the oldest holds every slot
// above but the last two.
constexpr uint32_t kOldest = 17;
constexpr uint32_t kNewest = 18;
constexpr uint32_t kKernelAllocator = 18;
constexpr uint32_t kShapeReference = 24;

}  // namespace ort

#endif  // RMSNORM_DEPLOY_ORT_ABI_H_
