# Highway 1.2 or newer: an installed package, or its sources (get_highway.py), of which three files become part of the library.
# Sets ANYFLASH_HIGHWAY to what the library links.
find_package(hwy 1.2 CONFIG QUIET)
if(hwy_FOUND)
  set(ANYFLASH_HIGHWAY hwy::hwy)
  return()
endif()

set(ANYFLASH_DEPENDENCIES "${PROJECT_SOURCE_DIR}/.deps" CACHE PATH "Where fetched sources are kept")
set(highway "${ANYFLASH_DEPENDENCIES}/highway")
if(NOT EXISTS "${highway}/hwy/highway.h")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  message(STATUS "Fetching Highway into ${ANYFLASH_DEPENDENCIES}")
  execute_process(COMMAND ${Python3_EXECUTABLE} "${CMAKE_CURRENT_LIST_DIR}/get_highway.py" "${ANYFLASH_DEPENDENCIES}"
                  RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "Highway is missing: install it (CMake package hwy 1.2 or newer), or mend what get_highway.py says above")
  endif()
endif()
add_library(anyflash_highway OBJECT ${highway}/hwy/abort.cc ${highway}/hwy/aligned_allocator.cc
                                    ${highway}/hwy/targets.cc)
target_include_directories(anyflash_highway SYSTEM PUBLIC ${highway})
target_compile_definitions(anyflash_highway PUBLIC HWY_STATIC_DEFINE)
set_target_properties(anyflash_highway PROPERTIES CXX_VISIBILITY_PRESET hidden)  # no business of those who link the library
set(ANYFLASH_HIGHWAY $<BUILD_INTERFACE:anyflash_highway>)
