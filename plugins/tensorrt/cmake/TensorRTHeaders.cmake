# Sets RMSNORM_TENSORRT_HEADERS to a folder with NvInferRuntime.h, looked for in this order: the option
# RMSNORM_TENSORRT_INCLUDE, TENSORRT_ROOT (variable or environment), the system, and a package with the headers from the
# package index (Apache-2.0, unpacked in the build folder).
set(RMSNORM_TENSORRT_INCLUDE "" CACHE PATH "Folder with NvInferRuntime.h")
set(RMSNORM_TENSORRT_WHEEL "kernel-lens==2.0.1" CACHE STRING "A package whose wheel has TensorRT's headers")

function(rmsnorm_fetch_tensorrt_headers folder)
  find_package(Python3 COMPONENTS Interpreter REQUIRED)
  file(MAKE_DIRECTORY ${folder})
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --no-deps --only-binary=:all: --dest ${folder}
            ${RMSNORM_TENSORRT_WHEEL}
    RESULT_VARIABLE failed ERROR_VARIABLE why)
  file(GLOB wheel ${folder}/*.whl)
  if(failed OR NOT wheel)
    message(FATAL_ERROR "No TensorRT headers: give -DTENSORRT_ROOT=... or -DRMSNORM_TENSORRT_INCLUDE=..., and "
                        "${RMSNORM_TENSORRT_WHEEL} could not be downloaded either: ${why}")
  endif()
  list(GET wheel 0 wheel)
  execute_process(COMMAND ${CMAKE_COMMAND} -E tar xf ${wheel} WORKING_DIRECTORY ${folder})
endfunction()

set(RMSNORM_TENSORRT_HEADERS "${RMSNORM_TENSORRT_INCLUDE}")
if(NOT RMSNORM_TENSORRT_HEADERS)
  find_path(found_headers NvInferRuntime.h NO_CACHE NO_DEFAULT_PATH
    HINTS ${TENSORRT_ROOT} $ENV{TENSORRT_ROOT} PATH_SUFFIXES include)
  if(NOT found_headers)
    find_path(found_headers NvInferRuntime.h NO_CACHE PATH_SUFFIXES x86_64-linux-gnu aarch64-linux-gnu)
  endif()
  if(NOT found_headers)
    file(GLOB_RECURSE fetched ${CMAKE_CURRENT_BINARY_DIR}/headers/*/NvInferRuntime.h)
    if(NOT fetched)
      rmsnorm_fetch_tensorrt_headers(${CMAKE_CURRENT_BINARY_DIR}/headers)
      file(GLOB_RECURSE fetched ${CMAKE_CURRENT_BINARY_DIR}/headers/*/NvInferRuntime.h)
    endif()
    list(GET fetched 0 fetched)
    get_filename_component(found_headers ${fetched} DIRECTORY)
  endif()
  set(RMSNORM_TENSORRT_HEADERS ${found_headers})
endif()
if(NOT EXISTS ${RMSNORM_TENSORRT_HEADERS}/NvInferRuntime.h)
  message(FATAL_ERROR "${RMSNORM_TENSORRT_HEADERS} has no NvInferRuntime.h")
endif()
message(STATUS "TensorRT headers: ${RMSNORM_TENSORRT_HEADERS}")
