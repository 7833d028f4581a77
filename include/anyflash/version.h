// The version: the build and the Python package read it here.
#pragma once

/// The version of these headers. anyflash_version() in c_api.h returns the library's.
#define ANYFLASH_VERSION "0.1.0"
