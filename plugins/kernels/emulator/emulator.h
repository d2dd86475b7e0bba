/* Runs the CUDA kernels on the host, as a device of the caller's choice would be asked to. Plain C, for ctypes. */
#ifndef RMSNORM_DEPLOY_EMULATOR_H_
#define RMSNORM_DEPLOY_EMULATOR_H_

#include "../rms_norm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The only memory that a kernel may touch. */
typedef struct rmsnorm_emulated_buffer {
  void* base;
  int64_t bytes;
  int32_t writable;
  int32_t reserved;
} rmsnorm_emulated_buffer;

typedef struct rmsnorm_emulated_device {
  int32_t compute; /* 90 for compute capability 9.0 */
  int32_t multiprocessors;
  int32_t shared_bytes; /* the most a block may have */
  int32_t tactic;       /* 1: the launch table's choice; see launch.h */
} rmsnorm_emulated_device;

/* Counted for each of: x, skip, scale, bias, y, sum, x again, skip again, partial sums. */
typedef struct rmsnorm_emulated_traffic {
  int64_t bytes;
  int64_t requests;        /* instructions of a warp */
  int64_t single_requests; /* those of them that move less than 16 bytes a thread */
  int64_t sectors;         /* of 32 bytes, touched by those */
  int64_t cached_sectors;  /* those of them that the warp's request before had just touched */
  int64_t least_sectors;   /* the fewest that as many bytes need */
} rmsnorm_emulated_traffic;

typedef struct rmsnorm_emulated_report {
  rmsnorm_emulated_traffic traffic[9];
  int64_t barriers; /* passed by blocks, those of clusters included */
  int64_t blocks;
  int32_t layout;
  int32_t threads;
  int32_t lanes;
  int32_t cluster;
  int32_t kept;
  int32_t shared_bytes;
  int32_t tactic_applies;
  int32_t slices; /* of a row, where it is split over independent blocks */
  char reason[192];
  char fault[256]; /* the first thing that a device would not forgive; empty where there is none */
} rmsnorm_emulated_report;

/* The launch alone where buffers is NULL. */
RMSNORM_API rmsnorm_status rmsnorm_emulate(const rmsnorm_args* args, const rmsnorm_emulated_device* device,
                                           const rmsnorm_emulated_buffer* buffers, int32_t buffer_count,
                                           rmsnorm_emulated_report* report);

#ifdef __cplusplus
}
#endif

#endif /* RMSNORM_DEPLOY_EMULATOR_H_ */
