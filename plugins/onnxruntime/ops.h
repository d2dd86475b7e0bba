// The custom ops as a table: one for each name and combination of dtypes that the name allows.
#ifndef RMSNORM_DEPLOY_ORT_OPS_H_
#define RMSNORM_DEPLOY_ORT_OPS_H_

#include "names.h"
#include "ort_abi.h"

namespace rmsnorm_ort {

using CudaFn = rmsnorm_status (*)(const rmsnorm_args*, void* stream);

// The runtime hands `base` back to every callback.
struct Op {
  ort::CustomOp base;
  const ort::Api* api;
  bool shape_reference;  // api has ort::ShapeReference
  CudaFn cuda;           // nullptr: this op runs on the CPU
  Variant variant;
  rmsnorm_dtype x;
  rmsnorm_dtype param;
  rmsnorm_dtype y;
  char name[kNameBytes];
};

// The most that make_ops fills in.
constexpr int kMostOps = kVariants * 6 * 2;

// Fills ops and returns their number. cuda nullptr: none for the CUDA provider. minor: the y of a runtime 1.y, no less
// than ort::kOldest, that api is from.
int make_ops(Op* ops, const ort::Api* api, uint32_t minor, CudaFn cuda);

}  // namespace rmsnorm_ort

#endif  // RMSNORM_DEPLOY_ORT_OPS_H_
