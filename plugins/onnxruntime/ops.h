// The custom ops as a table: one for each name and combination of dtypes that the name allows.
#ifndef RMSNORM_DEPLOY_ORT_OPS_H_
#define RMSNORM_DEPLOY_ORT_OPS_H_

#include "names.h"
#include "ort_abi.h"

namespace rmsnorm_ort {

// rmsnorm_cuda and rmsnorm_cuda_workspace_bytes; both or neither are there.
struct Cuda {
  rmsnorm_status (*run)(const rmsnorm_args*, void* stream);
  int64_t (*workspace_bytes)(const rmsnorm_args*);
};

// The runtime hands `base` back to every callback.
struct Op {
  ort::CustomOp base;
  const ort::Api* api;
  uint32_t minor;  // the y of the runtime 1.y that api is from
  Cuda cuda;       // without functions this op runs on the CPU
  Variant variant;
  rmsnorm_dtype x;
  rmsnorm_dtype param;
  rmsnorm_dtype y;
  char name[kNameBytes];
};

// The most that make_ops fills in.
constexpr int kMostOps = kVariants * 6 * 2;

// Fills ops and returns their number. Without CUDA functions there are none for the CUDA provider. minor: no less than
// ort::kOldest.
int make_ops(Op* ops, const ort::Api* api, uint32_t minor, const Cuda& cuda);

}  // namespace rmsnorm_ort

#endif  // RMSNORM_DEPLOY_ORT_OPS_H_
