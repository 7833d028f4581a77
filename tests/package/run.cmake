# See CMakeLists.txt. Starts from empty folders, so that nothing of an earlier run can help.
set(installed "${FOLDER}/installed")
set(consumer "${FOLDER}/consumer")
file(REMOVE_RECURSE "${installed}" "${consumer}")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${installed}" --component library)
set(flags)
if(SANITIZE)
  set(flags "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}" "-DCMAKE_C_FLAGS=-fsanitize=${SANITIZE}")
endif()
run(${CMAKE_COMMAND} -S "${SOURCE}" -B "${consumer}" -G "${GENERATOR}" "-DCMAKE_PREFIX_PATH=${installed}"
    -DCMAKE_C_COMPILER=${C_COMPILER} -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DCMAKE_BUILD_TYPE=Release ${flags})
run(${CMAKE_COMMAND} --build "${consumer}")
run(${CMAKE_CTEST_COMMAND} --test-dir "${consumer}" --output-on-failure)

foreach(name LICENSE NOTICE)
  file(GLOB_RECURSE found "${installed}/${name}")
  if(NOT found)
    message(FATAL_ERROR "${name} is not installed")
  endif()
endforeach()

# What is installed must not lead back to where it was built.
file(GLOB_RECURSE texts "${installed}/*.cmake" "${installed}/*.h")
foreach(text ${texts})
  file(STRINGS "${text}" found REGEX "${BUILD}|highway")
  if(found)
    message(FATAL_ERROR "${text} mentions ${found}")
  endif()
endforeach()
