# The CMake package: find_package(anyflash), target anyflash::anyflash.
include(CMakePackageConfigHelpers)
