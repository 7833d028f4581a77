// The version: the build and the Python package read it here.
#pragma once

#define ANYFLASH_VERSION "0.1.0"
