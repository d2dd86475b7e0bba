/* RMSNorm and SkipRMSNorm over rows, as docs/op-spec.md defines them: one plain-C interface in front of the CPU and the
 * CUDA kernels.
 *
 * With a row x of `width` elements and arithmetic in the stash type:
 *     m = mean(x * x);  r = sqrt(m + eps) | sqrt(m) + eps | max(sqrt(m), eps);  n = x / r
 *     y = cast(n * scale + bias)       RMSNORM_BEFORE_CAST: y has x's dtype
 *     y = cast(n) * scale + bias       RMSNORM_AFTER_CAST:  y has the wider of x's and scale's dtypes
 * With `skip`, x is first replaced by sum = cast(x + skip), which is also stored where `sum` is given.
 *
 * Every function returns a status and never throws, prints, allocates on the caller's behalf or exits.
 */
#ifndef RMSNORM_DEPLOY_RMS_NORM_H_
#define RMSNORM_DEPLOY_RMS_NORM_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define RMSNORM_API __declspec(dllexport)
#else
#define RMSNORM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Grows by one whenever rmsnorm_args or a meaning in this file changes. */
#define RMSNORM_ABI 2

typedef enum rmsnorm_status {
  RMSNORM_OK = 0,
  RMSNORM_BAD_ARGUMENT = 1, /* a null pointer, a negative size, a stride below the width, an unknown enum value */
  RMSNORM_BAD_DTYPE = 2,    /* dtypes that docs/op-spec.md does not combine */
  RMSNORM_UNSUPPORTED = 3,  /* valid, and this build or device has no kernel for it */
  RMSNORM_DEVICE_ERROR = 4, /* the CUDA runtime refused; nothing is known of the output */
  RMSNORM_ABI_MISMATCH = 5  /* rmsnorm_args.abi is not this library's RMSNORM_ABI */
} rmsnorm_status;

typedef enum rmsnorm_dtype { RMSNORM_F32 = 0, RMSNORM_F16 = 1, RMSNORM_BF16 = 2, RMSNORM_F64 = 3 } rmsnorm_dtype;

typedef enum rmsnorm_eps_mode {
  RMSNORM_EPS_INSIDE = 0,  /* r = sqrt(m + eps) */
  RMSNORM_EPS_OUTSIDE = 1, /* r = sqrt(m) + eps */
  RMSNORM_EPS_CLAMP = 2    /* r = max(sqrt(m), eps) */
} rmsnorm_eps_mode;

typedef enum rmsnorm_scale_order { RMSNORM_AFTER_CAST = 0, RMSNORM_BEFORE_CAST = 1 } rmsnorm_scale_order;

typedef enum rmsnorm_stash {
  RMSNORM_STASH_F32 = 0,
  RMSNORM_STASH_F64 = 1 /* for x of RMSNORM_F64 only */
} rmsnorm_stash;

/* One call. Zero-initialise it, then set what is needed; enums are stored as int32_t so that the layout is the same
 * from every language. Pointers are to the host's memory for rmsnorm_cpu and to the device's for rmsnorm_cuda. Nothing
 * needs more alignment than its element. y may be x itself, and sum may be x or skip itself (the same pointer and
 * stride); any other overlap of an output with anything is undefined. */
typedef struct rmsnorm_args {
  int32_t abi;         /* RMSNORM_ABI */
  int32_t x_dtype;     /* of x, skip and sum: any rmsnorm_dtype */
  int32_t param_dtype; /* of scale and bias: x_dtype, or F32 where x is F16 or BF16; ignored without either */
  int32_t y_dtype; /* AFTER_CAST: the wider of x_dtype and param_dtype; BEFORE_CAST, or no scale and no bias: x_dtype */
  int32_t eps_mode;    /* rmsnorm_eps_mode */
  int32_t scale_order; /* rmsnorm_scale_order */
  int32_t stash;       /* rmsnorm_stash */
  int32_t reserved;    /* 0 */
  double eps;          /* rounded to the stash type before use */
  int64_t rows;        /* >= 0; with 0 nothing is read or written */
  int64_t width;       /* >= 0 elements of a row; with 0 nothing is read or written */
  int64_t scale_count; /* width, or 1 to broadcast over the row; ignored without scale */
  int64_t bias_count;  /* the same for bias */
  int64_t x_stride;    /* elements from one row to the next: >= width, or 0 for x and skip to repeat one row */
  int64_t skip_stride;
  int64_t y_stride;
  int64_t sum_stride;
  const void* x;
  const void* skip;  /* NULL: RMSNorm; else SkipRMSNorm */
  const void* scale; /* NULL: ones */
  const void* bias;  /* NULL: zeros */
  void* y;
  void* sum; /* may be NULL; needs skip */
  /* Device memory for rmsnorm_cuda alone, aligned to 4 bytes, whose contents need not be set and mean nothing
   * afterwards. It may serve any number of calls on one stream, and must not serve two streams at once. NULL, or fewer
   * bytes than rmsnorm_cuda_workspace_bytes asks for: the same result, later where few long rows leave the device
   * idle. */
  void* workspace;
  int64_t workspace_bytes;
} rmsnorm_args;

/* Calls task(arg, i) once for every i in 0 .. count-1, in any order and on any threads, and returns when all are done.
 */
typedef void (*rmsnorm_task)(void* arg, size_t index);

/* The caller's threads. */
typedef struct rmsnorm_parallel {
  void (*parallel_for)(void* pool, rmsnorm_task task, void* arg, size_t count);
  void* pool;
  int32_t threads; /* how many run at once, this one included; 0 when the caller does not know */
} rmsnorm_parallel;

/* Checks args as both kernels do, except what only a device can know. */
RMSNORM_API rmsnorm_status rmsnorm_check(const rmsnorm_args* args);

/* One English line without a newline, for every value; never NULL. */
RMSNORM_API const char* rmsnorm_status_string(rmsnorm_status status);

/* parallel NULL: on the calling thread alone. */
RMSNORM_API rmsnorm_status rmsnorm_cpu(const rmsnorm_args* args, const rmsnorm_parallel* parallel);

/* A process-wide pool of `threads` threads (this library's own), for callers who have none. It starts on first use and
 * serves one caller at a time; a second one meanwhile runs on its own thread. NULL where threads <= 1. */
RMSNORM_API const rmsnorm_parallel* rmsnorm_cpu_pool(int32_t threads);

/* "avx512", "avx2", "neon" or "generic": what rmsnorm_cpu runs. */
RMSNORM_API const char* rmsnorm_cpu_isa(void);

/* Makes rmsnorm_cpu run another of them, for tests and benchmarks; "" goes back to the best. RMSNORM_UNSUPPORTED where
 * this machine or build lacks it. The environment variable RMSNORM_CPU_ISA does the same at load. */
RMSNORM_API rmsnorm_status rmsnorm_cpu_set_isa(const char* isa);

/* Queues the work on a cudaStream_t (NULL: the default stream) of the current device and returns; it neither allocates
 * nor synchronises, and may be captured in a CUDA graph. RMSNORM_UNSUPPORTED for RMSNORM_F64, and
 * on a device of an architecture that the library was not built for. */
RMSNORM_API rmsnorm_status rmsnorm_cuda(const rmsnorm_args* args, void* stream);

/* The workspace that speeds up this call, and any of fewer rows of the same width and dtype: some KiB, or 0 where none
 * would. It depends on rows, width and x_dtype alone, so that it may be asked for without a device and with every
 * pointer NULL; the other fields are not read. */
RMSNORM_API int64_t rmsnorm_cuda_workspace_bytes(const rmsnorm_args* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* RMSNORM_DEPLOY_RMS_NORM_H_ */
