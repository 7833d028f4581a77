# ANYFLASH_CUDA: AUTO builds the CUDA backend where a CUDA compiler of a new enough toolkit works, ON demands one. It
# takes minutes. The library then still runs where no GPU is.
# Instructions in the kernels are of PTX 8.1 (nvcc 12.1); launches that begin early are part of graphs from 12.3 on.
set(oldest_nvcc 12.3)
set(ANYFLASH_CUDA AUTO CACHE STRING "Build for NVIDIA GPUs: AUTO (if nvcc ${oldest_nvcc} or newer is found), ON or OFF")
set_property(CACHE ANYFLASH_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT ANYFLASH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "ANYFLASH_CUDA: ${ANYFLASH_CUDA}, expected AUTO, ON or OFF")
endif()
set(ANYFLASH_HAS_CUDA OFF)
if(ANYFLASH_CUDA STREQUAL OFF)
  return()
endif()

option(ANYFLASH_CUDA_SMALL_TILES "Every GPU takes the tiles of sm_75, to test them" OFF)
# Without architectures nvcc, too, compiles for sm_75 what newer GPUs translate.
if(DEFINED ANYFLASH_CUDA_ARCHITECTURES AND NOT ANYFLASH_CUDA_SMALL_TILES AND
   (NOT ANYFLASH_CUDA_ARCHITECTURES OR ANYFLASH_CUDA_ARCHITECTURES MATCHES "(^|;)7[0-9](-virtual)?(;|$)"))
  message(FATAL_ERROR
          "ANYFLASH_CUDA_ARCHITECTURES: ${ANYFLASH_CUDA_ARCHITECTURES}, expected GPUs, of them sm_75 as 75-real: newer "
          "ones that translate code for it would ask for kernels that it lacks")
endif()

# Ends this file under AUTO, and all under ON. Another compiler is looked for the next time.
macro(anyflash_no_cuda why)
  unset(CMAKE_CUDA_COMPILER CACHE)
  unset(ANYFLASH_NVCC CACHE)
  if(ANYFLASH_CUDA STREQUAL ON)
    message(FATAL_ERROR
            "ANYFLASH_CUDA is ON, but ${why}: install the CUDA toolkit ${oldest_nvcc} or newer, or set CUDACXX")
  endif()
  message(STATUS "anyflash: ${why}, so not for NVIDIA GPUs")
  return()
endmacro()

if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(ANYFLASH_NVCC nvcc HINTS "$ENV{CUDA_PATH}/bin" "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin)
  mark_as_advanced(ANYFLASH_NVCC)
  if(NOT ANYFLASH_NVCC)
    anyflash_no_cuda("there is no nvcc")
  endif()
  set(ENV{CUDACXX} "${ANYFLASH_NVCC}")
endif()
# Tried by a project of its own, whose errors are not this one's; these options reach it by the environment.
if(CMAKE_CUDA_HOST_COMPILER)
  set(ENV{CUDAHOSTCXX} "${CMAKE_CUDA_HOST_COMPILER}")
endif()
if(CMAKE_CUDA_FLAGS)
  set(ENV{CUDAFLAGS} "${CMAKE_CUDA_FLAGS}")
endif()
include(CheckLanguage)
check_language(CUDA)
set(found_version)
if(CMAKE_CUDA_COMPILER)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE found_version ERROR_QUIET)
endif()
if(NOT found_version MATCHES "release ([0-9.]+)" OR CMAKE_MATCH_1 VERSION_LESS oldest_nvcc)
  anyflash_no_cuda("no nvcc ${oldest_nvcc} or newer works here")
endif()

# Machine code for Turing, Ampere (and Ada), and Hopper. GPUs that are newer than Ampere and have none of their own
# translate Ampere's when a kernel is first called.
set(ANYFLASH_CUDA_ARCHITECTURES "75-real;80;90a-real" CACHE STRING "GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES")
set(CMAKE_CUDA_ARCHITECTURES "${ANYFLASH_CUDA_ARCHITECTURES}")
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know that nvcc speaks C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
find_package(CUDAToolkit REQUIRED)
set(ANYFLASH_HAS_CUDA ON)
message(STATUS "anyflash: for NVIDIA GPUs, ${ANYFLASH_CUDA_ARCHITECTURES}")
if(NOT ANYFLASH_CUDA_ARCHITECTURES MATCHES "90a")
  message(STATUS "anyflash: without 90a, so Hopper GPUs take the kernels of others")
endif()
