# Highway 1.3 or newer: an installed package, or sources, of which three files become part of the library: those kept in
# ANYFLASH_DEPENDENCIES, else Highway's own archive, else, where the network does not give that, NumPy's (get_highway.py).
# Sets ANYFLASH_HIGHWAY to what the library links.
find_package(hwy 1.3 CONFIG QUIET)
if(hwy_FOUND)
  set(ANYFLASH_HIGHWAY hwy::hwy)
  return()
endif()

set(folder "$ENV{ANYFLASH_DEPENDENCIES}")  # for several builds
if(NOT folder)
  set(folder "${PROJECT_BINARY_DIR}/dependencies")
endif()
set(ANYFLASH_DEPENDENCIES "${folder}" CACHE PATH "Where fetched sources are kept")
set(ANYFLASH_HIGHWAY_URL https://github.com/google/highway/archive/refs/tags/1.3.0.tar.gz CACHE STRING "")
mark_as_advanced(ANYFLASH_HIGHWAY_URL)
set(highway "${ANYFLASH_DEPENDENCIES}/highway")

# FetchContent would try a network that cannot be reached for minutes, and then end the build.
function(anyflash_fetch_highway)
  message(STATUS "Fetching Highway into ${ANYFLASH_DEPENDENCIES}")
  set(archive "${ANYFLASH_DEPENDENCIES}/highway.tar.gz")
  file(DOWNLOAD "${ANYFLASH_HIGHWAY_URL}" "${archive}" STATUS status TIMEOUT 20)
  list(POP_FRONT status failed why)
  if(NOT failed)
    file(SHA256 "${archive}" hash)
    if(hash STREQUAL 07b3c1ba2c1096878a85a31a5b9b3757427af963b1141ca904db2f9f4afe0bc2)
      file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${ANYFLASH_DEPENDENCIES}" PATTERNS */hwy/*)
      file(RENAME "${ANYFLASH_DEPENDENCIES}/highway-1.3.0" "${highway}")
      return()
    endif()
    set(why "not the expected SHA-256")
  endif()
  message(STATUS "Highway's own archive: ${why}; NumPy's is taken from the package index")
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  execute_process(COMMAND ${Python3_EXECUTABLE} "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/get_highway.py"
                          "${ANYFLASH_DEPENDENCIES}" RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "Highway is missing: install it (CMake package hwy 1.3 or newer), or correct what get_highway.py says above")
  endif()
endfunction()
if(NOT EXISTS "${highway}/hwy/highway.h")
  anyflash_fetch_highway()
endif()

add_library(anyflash_highway OBJECT ${highway}/hwy/abort.cc ${highway}/hwy/aligned_allocator.cc
                                    ${highway}/hwy/targets.cc)
target_include_directories(anyflash_highway SYSTEM PUBLIC ${highway})
target_compile_definitions(anyflash_highway PUBLIC HWY_STATIC_DEFINE)
set_target_properties(anyflash_highway PROPERTIES CXX_VISIBILITY_PRESET hidden)  # no business of those who link the library
set(ANYFLASH_HIGHWAY $<BUILD_INTERFACE:anyflash_highway>)
