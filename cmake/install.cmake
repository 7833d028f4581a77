# The CMake package: find_package(anyflash), target anyflash::anyflash.
include(CMakePackageConfigHelpers)
set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/anyflash")

install(TARGETS anyflash EXPORT anyflash-targets COMPONENT library
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT library)
install(DIRECTORY include/anyflash DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT library)
install(FILES LICENSE NOTICE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
install(EXPORT anyflash-targets NAMESPACE anyflash:: DESTINATION ${package_folder} COMPONENT library)

get_target_property(anyflash_kind anyflash TYPE)
configure_package_config_file(cmake/anyflash-config.cmake.in "${PROJECT_BINARY_DIR}/anyflash-config.cmake"
                              INSTALL_DESTINATION ${package_folder})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/anyflash-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/anyflash-config.cmake" "${PROJECT_BINARY_DIR}/anyflash-config-version.cmake"
        DESTINATION ${package_folder} COMPONENT library)
