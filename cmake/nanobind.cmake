# Finds nanobind: the one that nanobind_DIR names, else the one of the Python interpreter.
if(NOT nanobind_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir OUTPUT_STRIP_TRAILING_WHITESPACE
                  OUTPUT_VARIABLE nanobind_DIR RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "nanobind is missing: ${Python_EXECUTABLE} -m pip install nanobind==2.15.0")
  endif()
endif()
find_package(nanobind CONFIG REQUIRED)
# nanobind's own version file accepts one major version, so the range is checked here.
if(nanobind_VERSION VERSION_LESS 2.15 OR nanobind_VERSION VERSION_GREATER_EQUAL 4)
  message(FATAL_ERROR "nanobind ${nanobind_VERSION}: expected 2.15 to 3.x")
endif()
